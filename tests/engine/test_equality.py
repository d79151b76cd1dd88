"""The engines answer as transformers does: same tokens, same logits, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.base import Rows
from epd.layouts import PASSED
from tests.engine.conftest import chat, drawn_image
from tests.engine.driver import Driver, Request
from tests.engine.reference import reference_generate, reference_logits
from tests.engine.tiny_models import FAMILIES, SECOND_SIZES, VISION_FAMILIES

ALL = (*FAMILIES, "embedded")
SLOWEST = pytest.param("embedded", marks=pytest.mark.long)  # of the family of qwen3_vl
SEEING = (*VISION_FAMILIES, "embedded")
SECOND = [pytest.param(family, marks=pytest.mark.long) for family in SECOND_SIZES]
NEW_TOKENS = 10
Case = tuple[list[dict[str, object]], list[Any]]


def cases(family: str) -> list[Case]:
    """Text, one to four images, odd sizes, one image twice, two turns, a system message."""
    system: list[dict[str, object]] = [{"role": "system", "content": "Be brief."}]
    text: list[Case] = [
        (chat("hello there"), []),
        ([*system, *chat("What is 2 + 2?", "4", "and 3 + 3?")], []),
    ]
    if family not in (*SEEING, *SECOND_SIZES):
        return text
    same = drawn_image(7, 80, 61)
    return [
        *text,
        (chat((1, "what is it?")), [drawn_image(1, 64, 64)]),
        (chat((1, "odd")), [drawn_image(2, 37, 101)]),
        (chat((2, "compare")), [drawn_image(3, 33, 47), drawn_image(4, 90, 50)]),
        (chat((2, "same?")), [same, same]),
        (chat((4, "all")), [drawn_image(10 + i, 40 + 11 * i, 70 - 9 * i) for i in range(4)]),
        (chat((1, "first"), "yes", (1, "second")), [same, drawn_image(5, 55, 34)]),
    ]


@pytest.mark.parametrize("chunks", [(5,), pytest.param((4096, 16, 33), marks=pytest.mark.long)])
@pytest.mark.parametrize("family", [*FAMILIES, SLOWEST, *SECOND])
async def test_greedy_equals_generate_in_any_chunks(
    family: str, chunks: tuple[int, ...], driver: Callable[[str], Driver]
) -> None:
    """All prompts at once, prefill mixed with decode, for several chunk sizes."""
    serving = driver(family)
    golden = [
        reference_generate(serving.model_dir, prompt, images, NEW_TOKENS)
        for prompt, images in cases(family)
    ]
    for chunk in chunks:
        requests = [
            await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
            for i, (prompt, images) in enumerate(cases(family))
        ]
        answers = await serving.run(requests, chunk)
        serving.release(requests)
        assert answers == golden, f"chunks of {chunk}"


@pytest.mark.parametrize("family", [*ALL, *SECOND])
async def test_logits_equal(family: str, driver: Callable[[str], Driver]) -> None:
    """Whole prompts: of two turns, of four images, of an image that was there before."""
    serving = driver(family)
    for prompt, images in [*cases(family)[1:2], *cases(family)[-2:]]:
        request = await serving.request("r", prompt, images)
        logits = serving.language.logits([request.next_step(4096)])[0]
        serving.release([request])
        expected = reference_logits(serving.model_dir, prompt, images)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# --- the comparison can fail ----------------------------------------------------------------------


async def _two_images(serving: Driver) -> Request:
    images = [drawn_image(3, 48, 48), drawn_image(4, 80, 50)]
    return await serving.request("r", chat((2, "compare")), images)


@pytest.mark.parametrize("family", SEEING)
async def test_swapped_rows_are_noticed(family: str, driver: Callable[[str], Driver]) -> None:
    serving = driver(family)
    request = await _two_images(serving)
    clean = serving.language.logits([request.next_step(4096)])
    rows = request.rows[0].tensor.clone()
    rows[[0, 1]] = rows[[1, 0]]
    request.rows[0] = Rows(rows, len(rows), rows.nbytes)
    damaged = serving.language.logits([request.next_step(4096)])
    serving.release([request])
    assert (clean - damaged).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "embedded"])
async def test_each_deepstack_level_is_noticed(
    family: str, driver: Callable[[str], Driver]
) -> None:
    """Fault F12: a dropped level changes logits even where the text stays the same."""
    serving = driver(family)
    request = await _two_images(serving)
    clean = serving.language.logits([request.next_step(4096)])
    contract = serving.language.row_contract
    assert contract is not None and contract.num_deepstack == 2
    whole = request.rows[0]
    for level in range(1, 3):
        rows = whole.tensor.clone()
        rows[:, level * contract.hidden : (level + 1) * contract.hidden] = 0
        request.rows[0] = Rows(rows, len(rows), rows.nbytes)
        damaged = serving.language.logits([request.next_step(4096)])
        assert (clean - damaged).abs().max() > 1e-4, f"level {level}"
    serving.release([request])


@pytest.mark.parametrize("family", ALL)
async def test_a_zeroed_block_is_noticed(family: str, driver: Callable[[str], Driver]) -> None:
    serving = driver(family)
    request = await serving.request("r", chat("a text that fills more than one block"))
    await serving.step([request], 4096)
    step = request.next_step(1)
    clean = serving.language.logits([step])
    layout, at = serving.language.kv_layout, 0
    if layout.kinds:  # the first ones may be behind a window
        at = layout.rows.count(len(request.token_ids)) - 1
    serving.language.pool.views([request.blocks[at]])[0][:] = bytes(layout.block_nbytes)
    damaged = serving.language.logits([step])
    serving.release([request])
    assert (clean - damaged).abs().max() > 1e-3


# --- prefill here, decode there -------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
async def test_decode_continues_from_copied_blocks(
    family: str, driver: Callable[[str], Driver], model_dir: Callable[[str], Path]
) -> None:
    """The blocks' bytes, the first token and the delta are all that decoding needs (fault F26)."""
    from epd.config import EngineConfig
    from epd.engine.factory import build_executor, build_language

    config = EngineConfig(threads=1, kv_nbytes=1 << 20)
    serving = driver(family)
    executor = build_executor(config)
    language = build_language(model_dir(family), config, executor)
    memory = memoryview(bytearray(language.num_blocks * language.kv_layout.block_nbytes))
    language.attach_kv(memory)
    there = Driver(model_dir(family), None, language)
    prompt, images = cases(family)[-1]
    request = await serving.request("r", prompt, images, max_tokens=NEW_TOKENS)
    while not request.output:
        await serving.step([request], 13)
    blocks = request.blocks
    request.blocks = [block if block == PASSED else there.free.pop() for block in blocks]
    for source, target in zip(blocks, request.blocks, strict=True):
        if source != PASSED:
            language.pool.views([target])[0][:] = serving.language.pool.views([source])[0]
            serving.free.append(source)
    answers = await there.run([request])
    await executor.close()
    assert answers == [reference_generate(serving.model_dir, prompt, images, NEW_TOKENS)]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "embedded"])
async def test_a_wrong_delta_is_noticed(family: str, driver: Callable[[str], Driver]) -> None:
    serving = driver(family)
    request = await _two_images(serving)
    assert request.rope.delta < 0
    await serving.step([request], 4096)
    step = request.next_step(1)
    clean = serving.language.logits([step])
    step.rope_delta = 0
    damaged = serving.language.logits([step])
    serving.release([request])
    assert (clean - damaged).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_onevision"])
async def test_rows_as_byte_views_equal_one_tensor(
    family: str, driver: Callable[[str], Driver]
) -> None:
    """A receive pool gives an item's rows as slots, some of them read-only, each of whole rows."""
    serving = driver(family)
    request = await _two_images(serving)
    clean = serving.language.logits([request.next_step(4096)])
    contract = serving.language.row_contract
    assert contract is not None
    for i, rows in enumerate(request.rows):
        buffer = bytes(rows.buffer())
        slot = 3 * contract.row_nbytes
        request.rows[i] = [memoryview(buffer[at : at + slot]) for at in range(0, len(buffer), slot)]
    for chunk in (4096, 4):
        request.computed = 0
        while request.computed + chunk < len(request.token_ids):
            step = request.next_step(chunk)
            serving.language.run([step])
            request.computed += len(step.token_ids)
        again = serving.language.logits([request.next_step(chunk)])
        torch.testing.assert_close(again, clean, atol=1e-4, rtol=0)
    serving.release([request])
