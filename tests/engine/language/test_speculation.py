"""Drafts never change an answer: right, wrong, or mixed, greedy or drawn, on every family."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from epd.engine.base import Outcome, StepFailure, verify
from epd.engine.language import engine as language
from epd.messages import TokenLogprobs
from tests.engine.conftest import chat, drawn_image
from tests.engine.driver import Driver, Request
from tests.engine.reference import reference_generate, reference_inputs, reference_logits
from tests.engine.test_equality import SLOWEST, cases
from tests.engine.tiny_models import FAMILIES
from tests.model_files.test_grammar import JSON

NEW_TOKENS = 10


def oracle(answer: Sequence[int], wrong: Callable[[int], bool]) -> Callable[[list[int]], list[int]]:
    """Drafts four tokens of the right answer, some of them spoilt (by their place in it)."""

    def draft(output: list[int]) -> list[int]:
        first = len(output)
        right = list(answer[first : first + 4])
        return [t ^ 1 if wrong(first + at) else t for at, t in enumerate(right)]

    return draft


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f != "idefics3"), SLOWEST])
async def test_greedy_equals_generate_whatever_is_drafted(
    family: str, driver: Callable[[str], Driver]
) -> None:
    """All prompts at once, so that drafts meet prompts and plain decodes in one step."""
    serving = driver(family)
    asked = cases(family)[:5]
    golden = [reference_generate(serving.model_dir, *case, NEW_TOKENS) for case in asked]
    for name, wrong in {"right": none, "wrong": every, "mixed": third}.items():
        requests = [
            await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
            for i, (prompt, images) in enumerate(asked)
        ]
        for request, answer in list(zip(requests, golden, strict=True))[1:]:
            request.draft = oracle(answer, wrong)
        answers = await serving.run(requests, 16)
        serving.release(requests)
        assert answers == golden, name
        plain = [num_steps(request, 16) for request in requests]
        taken = [request.num_steps for request in requests]
        if name == "right":
            long = [i for i, answer in enumerate(golden) if i and len(answer) > 2]
            assert all(taken[i] < plain[i] for i in long)
        elif name == "wrong":
            assert taken == plain


def none(place: int) -> bool:
    return False


def every(place: int) -> bool:
    return True


def third(place: int) -> bool:
    return place % 3 == 0


def num_steps(request: Request, chunk: int) -> int:
    """Without drafts."""
    return -(-len(request.token_ids) // chunk) + len(request.output) - 1


HARD: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.3, "seed": 7},
    "filtered": {"temperature": 0.9, "seed": 8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "penalties, drawn": {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.3},
    "log-probabilities": {"num_logprobs": 3},
    "no end before": {"min_tokens": 12},
    "bias": {"logit_bias": ((65, 3.0),)},
    "grammar": {"grammar": JSON, "max_tokens": 60},
}


@pytest.mark.parametrize("what", HARD)
async def test_any_sampling_is_the_same(what: str, driver: Callable[[str], Driver]) -> None:
    """Tokens and log-probabilities, with right drafts, wrong ones, and both."""
    serving = driver("embedded")
    sampling = {"max_tokens": 24} | HARD[what]
    prompt = chat((1, "what is it?"))
    (plain,) = requests = [
        await serving.request("plain", prompt, [drawn_image(1, 64, 64)], **sampling)
    ]
    await serving.run(requests)
    serving.release(requests)
    draws = random.Random(1)
    mixed = [draws.random() < 0.4 for _ in range(100)]
    for wrong in (none, every, mixed.__getitem__):
        made = await serving.request(f"{wrong}", prompt, [drawn_image(1, 64, 64)], **sampling)
        made.draft = oracle(plain.output_ids, wrong)
        await serving.run([made])
        serving.release([made])
        assert made.output_ids == plain.output_ids
        for token, expected in zip(made.output, plain.output, strict=True):
            assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [i for i, _ in token.top] == [i for i, _ in expected.top]


NUM_DRAWN, TOP, TEMPERATURE = 160, 3, 1.5
RARE = 26.1  # chi-square of eight degrees of freedom is above it once in a thousand


async def chi_square(serving: Driver) -> float:
    """Of two drawn tokens, the second behind a draft, against the model's own probabilities;
    frequencies below five are one."""
    prompt = chat("hello there")
    ids = reference_inputs(serving.model_dir, prompt, [])["input_ids"][0].tolist()

    def likely(*more: int) -> dict[int, float]:
        best = reference_logits(serving.model_dir, [*ids, *more]).topk(TOP)
        chances = (best.values / TEMPERATURE).softmax(0).tolist()
        return dict(zip(best.indices.tolist(), chances, strict=True))

    firsts = likely()
    seconds = {token: likely(token) for token in firsts}
    sampling = {"temperature": TEMPERATURE, "top_k": TOP, "max_tokens": 3, "stop_token_ids": ()}
    drawn: Counter[tuple[int, int]] = Counter()
    for start in range(0, NUM_DRAWN, 16):
        seeds = range(start, start + 16)
        asked = [await serving.request(f"{i}", prompt, seed=i, **sampling) for i in seeds]
        for request in asked:
            request.draft = lambda output: [next(iter(seconds[output[0]]))]
        drawn.update((a, b) for a, b, _ in await serving.run(asked))
        serving.release(asked)
    assert sum(drawn.values()) == NUM_DRAWN
    expected = {(a, b): NUM_DRAWN * firsts[a] * p for a in firsts for b, p in seconds[a].items()}
    assert drawn.keys() <= expected.keys()
    pairs = [(drawn[pair], often) for pair, often in expected.items() if often >= 5]
    pairs += [(NUM_DRAWN - sum(n for n, _ in pairs), NUM_DRAWN - sum(e for _, e in pairs))]
    return sum((found - often) ** 2 / often for found, often in pairs)


async def test_the_distribution_is_the_models(driver: Callable[[str], Driver]) -> None:
    """And it would be noticed if it were not."""
    assert await chi_square(driver("embedded")) < RARE
    with mock.patch.object(language, "verify", gullible):
        assert await chi_square(driver("embedded")) > RARE


def gullible(
    drafts: Sequence[int], sample: Callable[[int], TokenLogprobs | StepFailure]
) -> Outcome:
    """Takes a draft although the model says another token."""
    said = verify(drafts, sample)
    if isinstance(said, tuple) and len(said) <= len(drafts):
        return (*said[:-1], TokenLogprobs(drafts[len(said) - 1], 0.0))
    return said


async def test_one_too_many_is_noticed(driver: Callable[[str], Driver]) -> None:
    """The comparison of this file can fail."""
    serving = driver("embedded")
    golden = reference_generate(serving.model_dir, chat("hello there"), [], NEW_TOKENS)
    request = await serving.request("r", chat("hello there"), max_tokens=NEW_TOKENS)
    request.draft = oracle(golden, third)
    with mock.patch.object(language, "verify", gullible):
        (answer,) = await serving.run([request])
    serving.release([request])
    assert answer != golden


async def test_stale_keys_behind_a_rejected_draft_are_never_read(
    driver: Callable[[str], Driver],
) -> None:
    """Wrong drafts reach into the next block, and the text grows over them token by token."""
    serving = driver("embedded")
    golden = reference_generate(serving.model_dir, chat("hello there"), [], 40, eos_token_id=None)
    request = await serving.request("r", chat("hello there"), max_tokens=40, stop_token_ids=())
    reach = 2 * serving.language.kv_layout.block_size
    request.draft = lambda output: [7] * min(reach, len(output) % 5 * 8)
    (answer,) = await serving.run([request])
    serving.release([request])
    assert answer == golden


def test_nothing_is_asked_behind_a_rejected_draft() -> None:
    asked: list[int] = []

    def sample(at: int) -> TokenLogprobs | StepFailure:
        asked.append(at)
        return TokenLogprobs((5, 6, 9, 8)[at], 0.0)

    said = verify((5, 6, 7, 8), sample)
    assert isinstance(said, tuple)
    assert [token.token_id for token in said] == [5, 6, 9]
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("at", [0, 2])
def test_a_failure_behind_a_confirmed_draft_is_the_next_steps_own(at: int) -> None:
    broken = StepFailure("not finite")
    said = verify((5, 6), lambda n: broken if n == at else TokenLogprobs(5 + n, 0.0))
    assert said == (broken if at == 0 else (TokenLogprobs(5, 0.0), TokenLogprobs(6, 0.0)))
