"""The fused decoder with the kernels' specification answers as transformers' own layers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from epd.engine.base import PENDING, StepFailure, StepSequence
from epd.engine.kernels import kernels_for
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.forward import FusedForward
from epd.engine.language.row_splice import RowSplicer
from epd.messages import SamplingParams, TokenLogprobs
from tests.engine.conftest import CONFIG
from tests.engine.driver import Driver
from tests.engine.language.test_speculation import oracle
from tests.engine.reference import reference_generate, reference_logits
from tests.engine.test_equality import NEW_TOKENS, SLOWEST, cases
from tests.engine.tiny_models import FAMILIES, OF_FOUR_NORMS


@pytest.fixture
def fused(driver: Callable[[str], Driver]) -> Callable[[str], Driver]:
    """The same vision engine and another language engine, whose decoder is fused."""
    from epd.engine.factory import build_executor, build_language

    def make(family: str) -> Driver:
        plain = driver(family)
        language = build_language(plain.model_dir, CONFIG, build_executor(CONFIG))
        language.forward = fuse(language)
        return Driver(plain.model_dir, plain.vision, language)

    return make


def fuse(language: TorchLanguageEngine) -> FusedForward:
    adapter: Any = language._adapter
    stack = adapter.language_model(language.model)
    decoder = adapter.decoder(stack, kernels_for("cpu"))
    assert decoder is not None
    contract = language.row_contract
    return FusedForward(
        language.model,
        stack,
        decoder,
        language.pool,
        RowSplicer(contract, torch.float32) if contract else None,
        multi_axis=adapter.rope_positions(1, ()).positions is not None,
        sees_both_ways=bool(adapter.max_uncut),
    )


# Each has the layers of another: qwen2_5_vl, qwen3_vl_moe and qwen3_5_moe, with the MLP of qwen3.
SELDOM = (
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_5",
    "idefics3",
    "internvl",
    "paddleocr_vl",
)  # idefics3: that of llama


@pytest.mark.parametrize(
    "family",
    [
        *(f for f in (*FAMILIES, "gemma4_moe") if f not in (*SELDOM, *OF_FOUR_NORMS)),
        *(pytest.param(f, marks=pytest.mark.long) for f in SELDOM),
        SLOWEST,
    ],
)
async def test_equals_transformers(family: str, fused: Callable[[str], Driver]) -> None:
    serving = fused(family)
    asked = [*cases(family)[1:2], *cases(family)[-2:]]
    for prompt, images in asked:
        request = await serving.request("r", prompt, images)
        logits = serving.language.logits([request.next_step(4096)])[0]
        serving.release([request])
        expected = reference_logits(serving.model_dir, prompt, images)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    requests = [
        await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
        for i, (prompt, images) in enumerate(asked)
    ]
    answers = await serving.run(requests, 16)
    golden = [reference_generate(serving.model_dir, p, i, NEW_TOKENS) for p, i in asked]
    assert answers == golden


@pytest.mark.parametrize("fuse_it", [True, False])
async def test_a_pending_token_is_taken_from_the_last_step(
    fuse_it: bool, fused: Callable[[str], Driver], driver: Callable[[str], Driver]
) -> None:
    serving = (fused if fuse_it else driver)("qwen3_vl")
    greedy = SamplingParams(max_tokens=9)
    prompts = {"a": list(b"the quick brown"), "b": list(b"fox jumps")}

    def step(name: str, ids: list[int], start: int) -> StepSequence:
        table = [1, 2] if name == "a" else [5, 6]
        return StepSequence(name, ids, start, table, None, sample=greedy)

    first = [step(name, ids, 0) for name, ids in prompts.items()]
    tokens = (await serving.language.step(first)).outcomes
    assert all(isinstance(token, TokenLogprobs) for token in tokens)
    known = [
        step(name, [token.token_id], len(ids))  # type: ignore[union-attr]
        for (name, ids), token in zip(prompts.items(), tokens, strict=True)
    ]
    expected = (await serving.language.step(known)).outcomes
    assert (await serving.language.step(first)).outcomes == tokens
    pending = [step(name, [PENDING], len(ids)) for name, ids in prompts.items()]
    stranger = StepSequence("c", [PENDING], 3, [7], None, sample=greedy)
    *found, failed = (await serving.language.step([*pending[::-1], stranger])).outcomes
    assert found[::-1] == expected
    assert isinstance(failed, StepFailure) and "did not sample" in failed.reason


async def test_drafts_are_verified(fused: Callable[[str], Driver]) -> None:
    """As on a GPU: chunks with drafts behind the decodes, several sampled places each; a step
    without drafts may be captured, and one with them leaves no token for the next."""
    serving = fused("qwen3_vl")
    asked = cases("qwen3_vl")[:5]
    golden = [reference_generate(serving.model_dir, p, i, NEW_TOKENS) for p, i in asked]
    requests = [
        await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
        for i, (prompt, images) in enumerate(asked)
    ]
    for request, answer in list(zip(requests, golden, strict=True))[::2]:
        request.draft = oracle(answer, lambda place: place % 3 == 0)
    assert await serving.run(requests, 16) == golden
    table = [1, 2]
    draft = StepSequence("a", [1, 2, 3], 0, table, None, sample=requests[0].sampling, num_drafts=2)
    await serving.language.step([draft])
    pending = StepSequence("a", [PENDING], 1, table, None, sample=requests[0].sampling)
    (failed,) = (await serving.language.step([pending])).outcomes
    assert isinstance(failed, StepFailure) and "did not sample" in failed.reason
