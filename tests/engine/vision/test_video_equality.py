"""Videos through the gateway's preparation and both engines answer as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.engine.base import Rows, StepFailure
from epd.messages import Address, MediaItem, SamplingParams
from epd.roles.steps.step import layouts_of
from tests.api.fakes import conversation
from tests.engine.driver import Driver, Request, end_tokens
from tests.engine.reference import (
    reference_generate,
    reference_inputs,
    reference_logits,
    reference_model,
)
from tests.engine.tiny_models import OF_GEMMA, OF_GLM
from tests.engine.vision.video_cases import Case, cases

# tests/roles: the bundled one
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl", "internvl_moe"),
    *(*OF_GLM, *OF_GEMMA),
)
NEW_TOKENS = 8
NOBODY = Address("e", 1, "")


async def prepared(serving: Driver, name: str, case: Case) -> Request:
    """A request as the gateway makes it of what a client sends, its media encoded."""
    preparer = Preparer(GatewayConfig(model_dir=str(serving.model_dir)))
    prompt = await preparer.chat(conversation(case.asked))
    await preparer.close()
    assert serving.vision is not None
    layouts, rows = [], []
    for i, item in enumerate(prompt.items):
        patches = await serving.vision.preprocess(item.image, item.grid_thw, item.clip)
        (whole,) = await serving.vision.encode([patches])
        assert isinstance(whole, Rows) and whole.num_rows == item.num_rows
        placed = MediaItem(
            index=i,
            mm_hash=item.mm_hash,
            offset=item.offset,
            num_rows=item.num_rows,
            grid_thw=item.grid_thw,
            room="",
            encoder=NOBODY,
            offsets=item.offsets,
            second_per_grid=item.second_per_grid,
        )
        layouts += layouts_of([placed])
        for _, first, count in placed.runs():
            part = whole.tensor[first : first + count]
            rows.append(Rows(part, count, part.nbytes))
    rope = serving.language.rope_positions(len(prompt.token_ids), layouts)
    params = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=end_tokens(serving.model_dir))
    request = Request(name, list(prompt.token_ids), layouts, rows, rope, sampling=params)
    contract = serving.language.row_contract
    request.sees_both_ways = contract is not None and bool(contract.max_uncut)
    serving.lease(request)
    return request


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        "qwen3_5",  # which numbers frames as qwen3_vl does
        "glm46v",
        "gemma4_moe",
        *(
            pytest.param(family, marks=pytest.mark.long)
            for family in FAMILIES
            if family not in ("qwen2_5_vl", "qwen3_5", "glm46v", "gemma4_moe")
        ),
    ],
)
async def test_tokens_and_logits_equal(family: str, driver: Callable[[str], Driver]) -> None:
    """Prompt ids, logits behind the prompt, and greedy tokens in chunks, all videos at once."""
    serving = driver(family)
    golden = []
    for case in cases(family):
        asked = (serving.model_dir, case.messages, case.images)
        request = await prepared(serving, "r", case)
        inputs = reference_inputs(*asked, case.videos)
        assert request.token_ids == inputs["input_ids"][0].tolist()
        logits = serving.language.logits([request.next_step(4096)])[0]
        serving.release([request])
        expected = reference_logits(*asked, case.videos)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        golden.append(reference_generate(*asked, NEW_TOKENS, case.videos))
    requests = [await prepared(serving, str(i), case) for i, case in enumerate(cases(family))]
    answers = await serving.run(requests, chunk=29)
    serving.release(requests)
    assert answers == golden


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", ["zeroed", "swapped", "frames swapped"])
async def test_one_wrong_row_is_noticed(
    family: str, damage: str, driver: Callable[[str], Driver]
) -> None:
    """The comparison can fail."""
    serving = driver(family)
    request = await prepared(serving, "r", cases(family)[1])
    clean = serving.language.logits([request.next_step(4096)])
    tensor = torch.cat([rows.tensor for rows in request.rows]).clone()
    per_frame = len(tensor) // request_frames(request)
    if damage == "zeroed":
        tensor[3] = 0
    elif damage == "swapped":
        tensor[[2, 3]] = tensor[[3, 2]]
    else:
        tensor[: 2 * per_frame] = tensor[: 2 * per_frame].roll(per_frame, 0)
    at = 0
    for i, rows in enumerate(request.rows):
        part = tensor[at : at + rows.num_rows]
        request.rows[i] = Rows(part, rows.num_rows, part.nbytes)
        at += rows.num_rows
    damaged = serving.language.logits([request.next_step(4096)])
    serving.release([request])
    assert (clean - damaged).abs().max() > 1e-3


def request_frames(request: Request) -> int:
    """Frames of the grid."""
    return sum(layout.grid_thw[0] for layout in request.layouts)


async def test_rows_of_a_frame_do_not_depend_on_the_others(driver: Callable[[str], Driver]) -> None:
    """The tower attends within a frame of the grid, as transformers does."""
    serving = driver("qwen2_5_vl")
    whole = await prepared(serving, "a", Case().frames(1, 6, 64, 48).text("?"))
    part = await prepared(serving, "b", Case().frames(1, 2, 64, 48).text("?"))
    serving.release([whole, part])
    assert (whole.layouts[0].grid_thw[0], part.layouts[0].grid_thw[0]) == (3, 1)
    first: Any = whole.rows[0].tensor[: part.rows[0].num_rows]
    torch.testing.assert_close(first, part.rows[0].tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seen", ["one way", "as one picture"])
async def test_how_frames_are_seen_is_noticed(seen: str, driver: Callable[[str], Driver]) -> None:
    """Transformers' own mask, given other kinds of tokens, is apart from ours."""
    serving, case = driver("gemma4_moe"), cases("gemma4_moe")[1]
    inputs = reference_inputs(serving.model_dir, case.messages, case.images, case.videos)
    kinds = inputs["mm_token_type_ids"]
    first, *_, last = kinds[0].nonzero()[:, 0].tolist()
    kinds[0, first : last + 1] = 0 if seen == "one way" else 2
    with torch.inference_mode():
        wrong = reference_model(serving.model_dir)(**inputs).logits[0, -1]
    request = await prepared(serving, "r", case)
    logits = serving.language.logits([request.next_step(4096)])[0]
    serving.release([request])
    assert (logits - wrong).abs().max() > 1e-3


async def test_a_chunk_that_ends_in_a_frame_is_refused(driver: Callable[[str], Driver]) -> None:
    """And one that ends between two is not."""
    serving = driver("gemma4_moe")
    request = await prepared(serving, "r", cases("gemma4_moe")[1])
    request.sees_both_ways = False
    first, second = request.layouts[:2]
    (outcome,) = serving.language.run([request.next_step(second.offset)]).outcomes
    assert outcome is None
    request.computed = first.offset
    (outcome,) = serving.language.run([request.next_step(second.offset + 5)]).outcomes
    assert isinstance(outcome, StepFailure)
    serving.release([request])
