"""Drafts by an EAGLE-3 head: those of the published forward; and heads that cannot be taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from safetensors.torch import load_file, save_file

from epd.config import SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.model_files.checkpoint import ModelError
from tests.engine.conftest import chat, drawn_image
from tests.engine.draft_models import COUNT, DRAFTING, Drafting, same_with_and_without
from tests.engine.eagle_heads import head_drafts, make_head
from tests.engine.language.test_graphs import Again
from tests.engine.reference import reference_generate, reference_inputs
from tests.engine.tiny_models import EMBEDDED, make_model

MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "rope_theta": 10000.0}
TURN = chat("hello there, and so on and so on")


def serving_of(model_dir: Path, head: Path, **more: Any) -> Drafting:
    speculative = SpeculativeConfig("eagle3", COUNT, model=str(head))
    config = structs.replace(DRAFTING, speculative=speculative, kv_nbytes=16 << 20, **more)
    executor = build_executor(config)
    has_vision = (model_dir / "preprocessor_config.json").exists()
    vision = build_vision(model_dir, config, executor) if has_vision else None
    return Drafting(model_dir, vision, build_language(model_dir, config, executor, 16))


async def compare(model_dir: Path, directory: Path, told: Any = None, **more: Any) -> None:
    """Drafts behind each step; and the answers, of which one has an image, with transformers'."""
    said = reference_generate(model_dir, TURN, [], 14)
    known = [*reference_inputs(model_dir, TURN, [])["input_ids"][0].tolist(), *said]
    head = make_head(directory, model_dir, [known], **told or {})
    serving = serving_of(model_dir, head, **more)
    if not (told or more):  # decodes as on a GPU
        serving.language.forward.capture(Again(), 16, 0)  # type: ignore[attr-defined]
    cases: list[Any] = [(TURN, [])]
    cases += [(chat((1, "what?")), [drawn_image(1, 64, 64)])] if serving.vision is not None else []
    asked = [await serving.request(str(i), *case, max_tokens=14) for i, case in enumerate(cases)]
    first, compared = asked[0], 0
    while not all(request.finished for request in asked):
        await serving.step(asked, 16)
        if (drafts := serving.proposed["0"]) and first.output and not first.finished:
            text = [*first.token_ids, *first.output_ids]
            assert drafts == head_drafts(head, model_dir, text, COUNT)
            compared += 1
    assert 3 <= compared < 12  # some drafts hold
    golden = [reference_generate(model_dir, *case, 14) for case in cases]
    assert [request.output_ids for request in asked] == golden
    serving.release(asked)
    wishes = {"temperature": 0.1, "seed": 7, "max_tokens": 14, "stop_token_ids": ()}
    await same_with_and_without(serving, TURN, **wishes)


KINDS = {"qwen3_vl": {}, "llama": {"draft_vocab_size": 272}, "qwen2_5_vl": MROPE}


@pytest.mark.parametrize("family", KINDS)
async def test_drafts_are_those_of_the_published_forward(family: str, tmp_path: Path) -> None:
    model_dir = EMBEDDED if family == "qwen3_vl" else make_model(family, tmp_path / "model")
    await compare(model_dir, tmp_path / "head", KINDS[family])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"hidden_size": 128, "num_key_value_heads": 4},
            "hidden_size is 128, not 256; .* 4, not 2",
        ),
        ({"vocab_size": 300, "norm_before_residual": True}, "300, not 272; .* is True, not False"),
        ({"eagle_config": None}, r"layer_ids \[2, 2, 1\] are not some of 4 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, r"\[1, 9\] are not some of 4 layers"),
        ({"intermediate_size": 8}, "lacks layers.0.mlp.gate_proj.weight, "),
    ],
)
def test_what_is_no_head_of_the_model_is_refused(told: Any, said: str, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", EMBEDDED)
    file, changed = head / "config.json", tmp_path / "changed"
    changed.mkdir()
    (changed / file.name).write_text(json.dumps(json.loads(file.read_text()) | told))
    with pytest.raises(ModelError, match=r"changed has no model\.safetensors|, not |of 4 layers"):
        serving_of(EMBEDDED, changed)
    (changed / "model.safetensors").symlink_to(head / "model.safetensors")
    with pytest.raises(ModelError, match=f"no EAGLE-3 head of this model.*{said}.*; give one"):
        serving_of(EMBEDDED, changed)


def test_a_vocabulary_or_a_model_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", EMBEDDED)
    with pytest.raises(ModelError, match="keys and values of one shape, and the model has not"):
        serving_of(make_model("kimi_k25", tmp_path / "model"), head)
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 1}, head / "model.safetensors")
    with pytest.raises(ModelError, match="beyond a vocabulary of 272; give one that is"):
        serving_of(EMBEDDED, head)


async def test_weights_of_no_sense_draft_tokens_of_the_model(tmp_path: Path) -> None:
    head = make_head(tmp_path, EMBEDDED)
    (head / "model.safetensors").unlink()
    serving = serving_of(EMBEDDED, head, load_format="dummy")
    await serving.run([await serving.request("r", TURN, [], max_tokens=8, stop_token_ids=())], 16)
    assert all(0 <= token < 272 for drafts in serving.made["r"] for token in drafts)
    assert any(serving.made["r"])
