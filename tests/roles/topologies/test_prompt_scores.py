"""Log-probabilities of prompts are those of transformers, however prompts are cut or moved."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd.engine.base import ChunkScores, Settled
from epd.fsm.request import Request
from epd.messages import SamplingParams, TokenLogprobs
from epd.roles.steps.prompt_scores import PromptScores, scoring_of
from epd.tiny import CHECKPOINT
from tests.engine.conftest import chat, drawn_image
from tests.engine.reference import reference_inputs, reference_model
from tests.roles.topologies.golden import Question, answer, ask, assert_exact, question
from tests.roles.topologies.test_exactness import (
    BLOCK_NBYTES,
    EVERY,
    change_sampling,
    serving,
    shared,
    total,
)

__all__ = ["shared"]  # a fixture
NUM_TOP = 3


async def scored(*turns: Any, images: tuple[Any, ...] = ()) -> tuple[Question, torch.Tensor]:
    """A question whose prompt is to be scored, and what transformers says of its tokens."""
    asked = await ask(list(turns), list(images))
    change_sampling(asked, num_prompt_logprobs=NUM_TOP)
    model = reference_model(CHECKPOINT)
    model.model.rope_deltas = None
    with torch.inference_mode():
        logits = model(**reference_inputs(CHECKPOINT, list(chat(*turns)), list(images))).logits
    return asked, logits[0, :-1].float().log_softmax(dim=-1)


def assert_scored(said: list[TokenLogprobs], asked: Question, expected: torch.Tensor) -> None:
    """Every token of the prompt but the first; values as fp32 allows, ranks and order exactly."""
    first, *others = said
    assert not any(token.prompt for token in others)
    token_ids = list(asked.generation.token_ids[1:])
    assert [entry.token_id for entry in first.prompt] == token_ids
    chosen = expected.gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    for entry, logprob, row in zip(first.prompt, chosen, expected, strict=True):
        assert abs(entry.logprob - logprob) < 1e-4
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(NUM_TOP).values.tolist(), abs=1e-4
        )
        likelier = int((row > logprob + 1e-4).sum())
        assert likelier < entry.rank <= int((row > logprob - 1e-4).sum()) + 1
        if entry.rank <= NUM_TOP:
            assert entry.top[entry.rank - 1] == (entry.token_id, entry.logprob)


@pytest.mark.parametrize("chunk", [7, pytest.param(1024, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "topology", [t if t == "1e1p1d" else pytest.param(t, marks=pytest.mark.long) for t in EVERY]
)
async def test_prompts_are_scored(topology: str, chunk: int, shared: dict[str, Any]) -> None:
    """With images and without, in company, and again when their blocks are in the cache."""
    text = "a text that fills some blocks of the cache, and is asked twice"
    asked, expected = await scored(text)
    imaged, of_image = await scored((1, text), images=(drawn_image(1, 61, 51),))
    plain = await question(text)
    async with serving(shared, topology, max_chunk_tokens=chunk) as cluster:
        for _ in range(2):
            said = await asyncio.gather(
                *(answer(cluster.gateway, one) for one in (asked, imaged, plain))
            )
            for tokens, one in zip(said, (asked, imaged, plain), strict=True):
                assert_exact(tokens, one)
            assert_scored(said[0], asked, expected)
            assert_scored(said[1], imaged, of_image)
            assert not said[2][0].prompt
        assert total(cluster, "prefix_cache_hit_tokens")  # of the plain one


def test_a_prompt_that_gave_way_in_its_middle_is_scored_anew() -> None:
    sampling = SamplingParams(max_tokens=1, num_prompt_logprobs=0)
    message = SimpleNamespace(
        request_id="r", attempt=1, sampling=sampling, gateway=None, deadline_s=1.0, num_emitted=0
    )
    request = Request("r/1", message, (1, 2, 3, 4, 5))
    scores = PromptScores()

    def computed(start: int, stop: int, *, is_last: bool = False) -> Settled:
        request.num_computed = start
        scoring = scoring_of(request, start, stop)
        assert scoring is not None
        found = tuple(TokenLogprobs(target, -float(start)) for target in scoring.targets)
        return scores.take(
            request, TokenLogprobs(9, 0.0, prompt=found) if is_last else ChunkScores(found)
        )

    assert computed(0, 2) is None
    assert computed(2, 3) is None
    assert len(scores) == 1
    assert computed(0, 1) is None  # from its beginning, and cut elsewhere
    said = computed(1, 5, is_last=True)
    assert isinstance(said, TokenLogprobs)
    assert [(token.token_id, token.logprob) for token in said.prompt] == [
        (2, 0.0), (3, -1.0), (4, -1.0), (5, -1.0)
    ]  # fmt: skip
    assert len(scores) == 0
    request.output.append(said)
    assert scoring_of(request, 0, 3) is None  # computed again for what it says next


@pytest.mark.parametrize("topology", ["1epd", pytest.param("1e1p1d", marks=pytest.mark.long)])
async def test_who_gives_way_is_scored_once(topology: str, shared: dict[str, Any]) -> None:
    """Computed again, a prompt has each of its tokens once."""
    texts = ["hello", "a longer question than that", "why?", "how?"]
    asked = [await scored(text) for text in texts]
    needed = max(len(q.generation.token_ids) + len(q.token_ids) for q, _ in asked)
    size = needed * 2 // 16 * BLOCK_NBYTES
    async with serving(shared, topology, max_chunk_tokens=7, kv_nbytes=size) as cluster:
        said = await asyncio.gather(*(answer(cluster.gateway, one) for one, _ in asked))
        assert total(cluster, "preemptions")
    for tokens, (one, expected) in zip(said, asked, strict=True):
        assert_exact(tokens, one)
        assert_scored(tokens, one, expected)
