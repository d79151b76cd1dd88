"""Gemma 4: windows, pictures that are seen both ways, layers that read others' rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from epd.config import ConfigError
from epd.engine import factory
from epd.engine.adapter import adapter_for
from epd.engine.base import StepFailure
from epd.engine.language import attention
from epd.engine.language.state_kinds import PagedRows, layout_of
from epd.engine.sharding import Collectives, Shard
from epd.engine.weights.loading import load_stage
from epd.layouts import PASSED, RowKind
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.conftest import CONFIG, chat, drawn_image
from tests.engine.driver import Driver
from tests.engine.reference import reference_generate, reference_logits

PROMPT = chat((2, "compare")), [drawn_image(3, 33, 47), drawn_image(4, 90, 50)]
LONG = chat("a text of many more tokens than the window of its layers has places for"), []


async def logits(serving: Driver, prompt: object) -> torch.Tensor:
    request = await serving.request("r", *prompt)  # type: ignore[misc]
    found = serving.language.logits([request.next_step(4096)])[0]
    serving.release([request])
    return found


@pytest.mark.parametrize("chunk", [7, 4096])
async def test_a_mixture_that_sees_pictures_both_ways_equals_generate(
    chunk: int, driver: Callable[[str], Driver]
) -> None:
    serving = driver("gemma4_moe")
    golden = [reference_generate(serving.model_dir, *case, 10) for case in (LONG, PROMPT)]
    requests = [
        await serving.request(str(i), *case, max_tokens=10) for i, case in enumerate((LONG, PROMPT))
    ]
    assert await serving.run(requests, chunk) == golden
    serving.release(requests)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("gemma4_moe", {"_sees_both_ways": False}), ("gemma4_moe", 0), ("gemma4", 0), ("gemma4", 25)],
    ids=["pictures one way", "no window", "no window of an E model", "a window longer by one"],
)
async def test_a_wrong_reach_is_noticed(
    family: str,
    wrong: dict[str, Any] | int,
    driver: Callable[[str], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = driver(family)
    forward: Any = serving.language.forward
    expected = reference_logits(serving.model_dir, *PROMPT)
    torch.testing.assert_close(await logits(serving, PROMPT), expected, atol=1e-4, rtol=0)
    if isinstance(wrong, int):
        (kind,) = forward._others
        wrong = {"_others": (structs.replace(kind, window=wrong),)}
    for name, value in wrong.items():
        monkeypatch.setattr(forward, name, value)
    assert (await logits(serving, PROMPT) - expected).abs().max() > 1e-3


async def test_a_chunk_may_begin_in_a_picture_whose_beginning_is_cached(
    driver: Callable[[str], Driver],
) -> None:
    """As behind a hit of the prefix cache: what is before it has seen all of the picture."""
    serving = driver("gemma4_moe")
    request = await serving.request("r", *PROMPT)
    whole = serving.language.logits([request.next_step(4096)])[0]
    first = request.layouts[0]
    request.computed = first.offset + first.num_rows // 2
    again = serving.language.logits([request.next_step(4096)])[0]
    torch.testing.assert_close(again, whole, atol=1e-4, rtol=0)
    serving.release([request])


async def test_a_chunk_that_ends_in_a_picture_is_refused(driver: Callable[[str], Driver]) -> None:
    serving = driver("gemma4_moe")
    request = await serving.request("r", *PROMPT)
    request.sees_both_ways = False
    step = request.next_step(request.layouts[0].offset + 5)
    (outcome,) = serving.language.run([step]).outcomes
    assert isinstance(outcome, StepFailure)
    assert outcome.reason == "a chunk that ends in a picture, behind 5 of its rows"
    serving.release([request])


@pytest.mark.parametrize(
    ("windowed", "full", "sizes"),
    [((12, 1), (3, 1), [16, 32]), ((20, 2), (4, 2), [16, 40]), ((25, 8), (5, 2), [16, 160])],
    ids=["E2B", "E4B", "26B-A4B"],
)
def test_blocks_of_both_kinds_are_as_large(
    windowed: tuple[int, int], full: tuple[int, int], sizes: list[int]
) -> None:
    """Layers and heads of each kind; nothing of a block is left over."""
    num_layers = windowed[0] + full[0]
    layers = range(windowed[0]), range(windowed[0], num_layers)
    kinds = tuple(
        RowKind(layers=tuple(its), num_kv_heads=heads, head_dim=width)
        for its, (_, heads), width in zip(layers, (windowed, full), (256, 512), strict=True)
    )
    layout = layout_of(
        PagedRows(num_layers, windowed[1], 256, kinds=kinds), (), torch.bfloat16, 16, 4
    )
    assert [kind.block_size for kind in layout.kinds] == sizes
    assert {
        len(k.layers) * 2 * k.block_size * k.num_kv_heads * k.head_dim * 2 for k in layout.kinds
    } == {layout.block_nbytes}


def test_what_is_not_computed_is_refused(model_dir: Callable[[str], Path]) -> None:
    """Ranks with other heads than others, steps without room for a picture; before any weight is
    read."""
    adapter: Any = adapter_for(read_checkpoint(model_dir("gemma4_moe")), attention.NAME)
    with pytest.raises(ConfigError, match="3 ranks cannot share 2 key and value heads alike"):
        adapter.kv_layout(torch.float32, 16, shard=Shard(1, 3, Collectives()))
    adapter = adapter_for(read_checkpoint(model_dir("gemma4")), attention.NAME)
    few = structs.replace(CONFIG, max_step_tokens=69)
    with pytest.raises(ConfigError, match=r"up to 70 here; raise engine\.max_step_tokens"):
        factory.build_language(model_dir("gemma4_moe"), few)
    factory._check_step(adapter, few)  # an E model, which sees pictures one way


@pytest.mark.parametrize(("family", "are_equal"), [("gemma4", True), ("gemma4_moe", False)])
def test_kv_goes_between_groups_whose_ranks_have_all_heads(
    family: str, are_equal: bool, model_dir: Callable[[str], Path]
) -> None:
    """Block by block; a part of one kind's heads is not taken out of blocks of several shapes.
    Four ranks have two heads twice, and are no group of two."""
    adapter: Any = adapter_for(read_checkpoint(model_dir(family)), attention.NAME)
    groups = [
        adapter.kv_layout(torch.float32, 16, shard=Shard(0, n, Collectives())) for n in (2, 4)
    ]
    alone, two, four = adapter.kv_layout(torch.float32, 16), *groups
    assert (two.whole == four.whole) == (alone.whole == two.whole) == are_equal
    assert adapter.kv_layout(torch.float32, 16, shard=Shard(1, 2, Collectives())).whole == two.whole


def test_what_hears_and_what_no_layer_reads_is_left_aside(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """As published E models have them."""
    directory = shutil.copytree(model_dir("gemma4"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.audio_tower.layers.0.norm_out.weight"] = torch.ones(4)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.ones(4, 4)
    tensors["model.language_model.layers.6.self_attn.k_proj.weight"] = torch.ones(32, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    load_stage(adapter_for(read_checkpoint(directory)), "language", torch.float32, "cpu")
    tensors["model.language_model.layers.7.layer_scalar"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors that config\.json has no place for"):
        load_stage(adapter_for(read_checkpoint(directory)), "language", torch.float32, "cpu")


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
async def test_an_answer_over_many_windows_equals_generate(
    family: str, driver: Callable[[str], Driver]
) -> None:
    """Blocks behind the window have other owners meanwhile, who fill them (`Driver`)."""
    serving = driver(family)
    golden = reference_generate(serving.model_dir, *LONG, 100, min_new_tokens=100)
    requests = [await serving.request(n, *LONG, max_tokens=100, min_tokens=100) for n in "ab"]
    assert await serving.run(requests, 7) == [golden, golden]
    layout = serving.language.kv_layout
    kept = [block for block in requests[0].blocks if block != PASSED]
    assert len(requests[0].blocks) - len(kept) == len([*layout.rows.behind(requests[0].computed)])
    assert len(requests[0].blocks) - len(kept) >= 4
    serving.release(requests)


async def test_a_block_that_a_window_reaches_is_not_given_up(
    driver: Callable[[str], Driver],
) -> None:
    serving = driver("gemma4")
    request = await serving.request("r", *LONG)
    await serving.step([request], 4096)
    rows = serving.language.kv_layout.rows
    size = rows.windowed[0].stop
    for place in rows.behind(request.computed + size):
        request.blocks[place] = PASSED
    (outcome,) = serving.language.run([request.next_step(1)]).outcomes
    assert isinstance(outcome, StepFailure)
    assert outcome.reason.startswith("a KV block outside the pool of")
    serving.release([request])
