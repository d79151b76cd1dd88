"""A stage holds its own weights and no others; every broken directory is one clear sentence."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.config import ConfigError, EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.base import StepSequence
from epd.engine.factory import build_language, build_vision
from epd.engine.weights.loading import LARGE_NBYTES, load_stage, parameters_on_meta
from epd.messages import SamplingParams
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.reference import reference_logits, reference_model, render
from tests.engine.tiny_models import FAMILIES, VISION_FAMILIES, make_model

CONFIG = EngineConfig(threads=1, kv_nbytes=1 << 20)
VISION = (
    *("visual", "vision_tower", "multi_modal_projector", "mm_projector", "image_newline"),
    *("vision_model", "connector", "projector", "embed_vision"),
    "view_separator",
)


def load(directory: Path, stage: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_stage(adapter_for(read_checkpoint(directory)), stage, dtype, "cpu")


def is_vision(name: str) -> bool:
    return any(part in VISION for part in name.split("."))


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_share_nothing_and_miss_nothing(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    """Listed by name: no tensor of the other stage is there, not even on meta; values are right."""
    directory = model_dir(family)
    whole = dict(reference_model(directory).named_parameters(remove_duplicate=False))
    stages = ["language", *(["vision"] if family in VISION_FAMILIES else [])]
    seen: set[str] = set()
    for stage in stages:
        model = load(directory, stage)
        named = dict(model.named_parameters(remove_duplicate=False))
        assert named.keys() == {n for n in whole if is_vision(n) == (stage == "vision")}
        assert not any(parameter.is_meta for parameter in model.parameters())
        for name, parameter in named.items():
            assert torch.equal(parameter, whole[name]), name
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, reference_model(directory).get_buffer(name))
        seen |= named.keys()
    assert seen == whole.keys()


def test_tied_heads_share_memory(model_dir: Callable[[str], Path]) -> None:
    model: Any = load(model_dir("qwen3_vl"), "language")
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight or (
        model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl"])
def test_sharded_checkpoints_are_read(family: str, tmp_path: Path) -> None:
    directory = make_model(family, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = reference_model(directory).state_dict()
    for name, tensor in load(directory, "language").state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_large_parameters_are_never_there() -> None:
    """Nor is what other threads make while a model is built taken for one of them."""
    with parameters_on_meta():
        large = torch.nn.Parameter(torch.empty(LARGE_NBYTES))
        small = torch.empty(4)
        elsewhere: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: elsewhere.append(torch.empty(LARGE_NBYTES)))
        other.start()
        other.join()
    assert large.is_meta and not small.is_meta and not elsewhere[0].is_meta
    assert not torch.empty(LARGE_NBYTES).is_meta


def test_dtype_is_configurable(model_dir: Callable[[str], Path]) -> None:
    model = load(model_dir("embedded"), "language", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    half = build_language(
        model_dir("embedded"), EngineConfig(threads=1, kv_nbytes=1 << 20, dtype="bfloat16")
    )
    assert half.kv_layout.dtype == "bfloat16"
    upcast = load(model_dir("embedded"), "vision")
    assert {parameter.dtype for parameter in upcast.parameters()} == {torch.float32}


_GROWTH = """
import sys, psutil, torch
from epd.model_files.checkpoint import read_checkpoint
from epd.engine.weights.loading import load_stage
from epd.engine.adapter import adapter_for

def load(directory, stage):
    adapter = adapter_for(read_checkpoint(directory))
    return load_stage(adapter, stage, torch.float32, "cpu")

warm = [load(sys.argv[1], stage) for stage in ("vision", "language")]
held = []
for stage in ("vision", "language"):
    before = psutil.Process().memory_info().rss
    held.append(load(sys.argv[2], stage))
    print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.long
def test_resident_memory_of_each_stage(tmp_path: Path) -> None:
    """Of a model with an 80 MB language part, a vision stage adds next to nothing to a process."""
    small = make_model("qwen3_vl", tmp_path / "small")
    large = make_model("qwen3_vl", tmp_path / "large", text={"intermediate_size": 35_000})
    entries = read_checkpoint(large).tensors.items()
    language_nbytes = sum(4 * math.prod(e.shape) for n, e in entries if not is_vision(n))
    assert language_nbytes > 80e6
    output = subprocess.run(
        [sys.executable, "-c", _GROWTH, str(small), str(large)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    vision, language = (int(line) for line in output.stdout.split())
    assert vision < 10e6
    assert language > 70e6


def _flatten_config(directory: Path) -> None:
    """config.json as Qwen2-VL published it: text settings at the top, mrope as `rope_scaling`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types", "dtype", "architectures"):
        text.pop(name, None)
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 2,
    }
    path.write_text(json.dumps(text | config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_configs_as_published_in_2024(family: str, tmp_path: Path) -> None:
    """Flat text settings, old rope names, tied head without a tensor of its own."""
    directory = make_model(family, tmp_path)
    edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    _flatten_config(directory)
    assert any(name.startswith("visual.") for name in read_checkpoint(directory).tensors)
    language = build_language(directory, CONFIG)
    prompt = [{"role": "user", "content": "hello"}]
    steps = StepSequence(
        "r", render(directory, prompt), 0, [3, 1, 2], None, sample=SamplingParams(max_tokens=1)
    )
    torch.testing.assert_close(
        language.logits([steps])[0], reference_logits(directory, prompt), atol=1e-4, rtol=0
    )


# --- broken directories ---------------------------------------------------------------------------


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        target = config[section] if section else config
        target[name] = value
    path.write_text(json.dumps(config))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


HEAD, NORM = "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"

BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "not there": (shutil.rmtree, "does not exist; give"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json; give"),
    "torn config": (lambda d: cut(d / "config.json", 0.5), "config.json cannot be read"),
    "no model_type": (lambda d: edit_config(d, model_type=None), "names no model_type"),
    "another family": (
        lambda d: edit_config(d, model_type="gpt2"),
        "'gpt2' model; supported are .*glm46v, glm4v, glm4v_moe, glm_ocr, idefics3",
    ),
    "absurd size": (lambda d: edit_config(d, text_config__hidden_size="x"), "config.json"),
    "impossible size": (lambda d: edit_config(d, vision_config__num_heads=0), "config.json"),
    "quantised": (lambda d: edit_config(d, quantization_config={"bits": 4}), "is quantised"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "torn weights": (lambda d: cut(d / "model.safetensors", 0.7), "not a whole safetensors file"),
    "torn header": (lambda d: cut(d / "model.safetensors", 0.001), "not a whole safetensors file"),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"PK" * 99),
        "not a whole safetensors file",
    ),
    "missing tensor": (
        lambda d: edit_weights(d, lambda t: t.pop(NORM)),
        f"lacks 1 tensors of qwen3_vl: {NORM};",
    ),
    "wrong shape": (
        lambda d: edit_weights(d, lambda t: t.update({NORM: torch.zeros(63)})),
        f"tensor {NORM} has shape \\[63\\] where config.json needs \\[64\\]",
    ),
    "integer weights": (
        lambda d: edit_weights(d, lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)})),
        f"tensor {NORM} is stored as I8",
    ),
    "deeper config": (
        lambda d: edit_config(d, text_config__num_hidden_layers=5),
        "lacks 22 tensors of qwen3_vl: .* and 19 more",
    ),
    "shallower config": (
        lambda d: edit_config(d, text_config__num_hidden_layers=2),
        r"has 11 tensors that .*: model\.language_model\.layers\.2\..* and 8 more; .* --allow-unu",
    ),
    "shallower tower": (
        lambda d: edit_config(d, vision_config__depth=2),
        r"has 12 tensors that config.json has no place for: model\.visual\.blocks\.2\.",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_is_one_sentence(kind: str, tmp_path: Path, model_dir: Any) -> None:
    directory = shutil.copytree(model_dir("qwen3_vl"), tmp_path / "model")
    breaks, message = BROKEN[kind]
    breaks(directory)
    with pytest.raises(ModelError, match=message) as caught:
        build_language(directory, CONFIG)
        build_vision(directory, CONFIG)
    assert "\n" not in str(caught.value).strip() and str(directory) in str(caught.value)


def test_a_family_that_transformers_lacks_is_named(
    model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, find = read_checkpoint(model_dir("paddleocr_vl")), importlib.util.find_spec
    there = lambda name, *of: None if name.endswith("models.paddleocr_vl") else find(name, *of)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    with pytest.raises(ModelError, match=r"transformers 5\S+ does not know paddleocr_vl; install"):
        adapter_for(checkpoint)


@pytest.mark.parametrize(("section", "name"), [("text", "num_hidden_layers"), ("vision", "depth")])
def test_fewer_layers_may_be_asked_for(
    section: str, name: str, tmp_path: Path, model_dir: Any
) -> None:
    """Both stages of a probe load, and what they hold is the beginning of the checkpoint."""
    directory = shutil.copytree(model_dir("qwen3_vl"), tmp_path / "model")
    edit_config(directory, **{f"{section}_config__{name}": 2})
    stored = load_file(directory / "model.safetensors")
    for stage in ("vision", "language"):
        adapter = adapter_for(read_checkpoint(directory))
        model = load_stage(adapter, stage, torch.float32, "cpu", allow_unused=True)
        for held, parameter in model.named_parameters():
            assert torch.equal(parameter, stored[HEAD if held == "lm_head.weight" else held])
    allowed = EngineConfig(threads=1, kv_nbytes=1 << 20, allow_unused_tensors=True)
    assert build_language(directory, allowed).kv_layout.num_layers == (
        2 if section == "text" else 3
    )


def test_what_older_releases_saved_too_is_skipped(tmp_path: Path, model_dir: Any) -> None:
    """And only that: a tensor that looks like it is not."""
    directory = shutil.copytree(model_dir("llama"), tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda t: t.update({name: torch.zeros(8)}))
    load(directory, "language")
    edit_weights(directory, lambda t: t.update({f"{name}_scale": torch.zeros(8)}))
    with pytest.raises(ModelError, match=f"has 1 tensors .*: {name}_scale;"):
        load(directory, "language")


@pytest.mark.parametrize("stored", ["both", "equal", "head"])
def test_tied_heads_as_they_are_stored(stored: str, tmp_path: Path, model_dir: Any) -> None:
    """config.json says tied; what is stored decides, as it does in transformers."""
    directory = shutil.copytree(model_dir("qwen3_vl"), tmp_path / "model")
    embedding = load_file(directory / "model.safetensors")[HEAD]
    head = embedding + 1 if stored == "both" else embedding.clone()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = head
        if stored == "head":
            del tensors[HEAD]

    edit_weights(directory, change)
    model: Any = load(directory, "language")
    tied = model.model.language_model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, head) and torch.equal(tied, embedding)
    assert (model.lm_head.weight.data_ptr() == tied.data_ptr()) == (stored != "both")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = make_model("qwen3", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        build_language(directory, CONFIG)


def test_a_text_model_has_no_encode_stage(model_dir: Any) -> None:
    with pytest.raises(ModelError, match="without the encode role"):
        build_vision(model_dir("llama"), CONFIG)


def test_sliding_window_attention_is_refused(tmp_path: Path, model_dir: Any) -> None:
    directory = shutil.copytree(model_dir("qwen3"), tmp_path / "model")
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    edit_config(directory, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    with pytest.raises(ModelError, match="sliding_attention"):
        build_language(directory, CONFIG)


@pytest.mark.parametrize("window", [8, "the default"])
def test_a_window_of_all_layers_is_refused(window: Any, tmp_path: Path, model_dir: Any) -> None:
    directory = shutil.copytree(model_dir("mistral3"), tmp_path / "model")
    text = json.loads((directory / "config.json").read_text())["text_config"]
    del text["sliding_window"]
    edit_config(directory, text_config=text | ({"sliding_window": 8} if window == 8 else {}))
    with pytest.raises(ModelError, match="sliding_attention"):
        build_language(directory, CONFIG)


def test_rope_that_couples_sequences_is_refused(tmp_path: Path, model_dir: Any) -> None:
    directory = shutil.copytree(model_dir("llama"), tmp_path / "model")
    rope = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}
    edit_config(directory, rope_parameters=rope)
    with pytest.raises(ModelError, match="'longrope' rope"):
        build_language(directory, CONFIG)


def test_dynamic_rope_is_the_default_one_up_to_the_context(tmp_path: Path, model_dir: Any) -> None:
    """In transformers, too, whose frequencies change with the first token behind it."""
    directory = shutil.copytree(model_dir("llama"), tmp_path / "model")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    edit_config(directory, rope_parameters=rope, max_position_embeddings=64)
    stack = build_language(directory, CONFIG).model.model
    theirs = reference_model(directory).model.rotary_emb
    last = torch.arange(64)[None]
    for _ in range(2):
        for ours, expected in zip(
            stack.rotary_emb(torch.ones(1), last), theirs(torch.ones(1), last), strict=True
        ):
            assert torch.equal(ours, expected)
    theirs(torch.ones(1), last + 1)
    assert not torch.equal(theirs.inv_freq, stack.rotary_emb.inv_freq)


def test_a_pool_without_a_block_is_refused(model_dir: Any) -> None:
    with pytest.raises(ConfigError, match="kv_nbytes is 100, less than the"):
        build_language(model_dir("llama"), EngineConfig(threads=1, kv_nbytes=100))
