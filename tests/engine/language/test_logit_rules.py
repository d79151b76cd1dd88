"""Bias, penalties and masks of many rows at once: as row by row, and with a token on its way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.engine.base import StepFailure
from epd.engine.language.logit_rules import Bits, LogitRules, SampleRequest
from epd.engine.language.sampler import Draft
from epd.messages import NoRepeat, SamplingParams
from tests.engine.language.sampling import sample

VOCABULARY = 83
SAMPLED = 5  # rows of the step before


def wish(draw: random.Random, vocabulary: int, row: int) -> SampleRequest:
    """Any mixture of what can be asked for; tokens repeat, so that lists meet."""
    some = [draw.randrange(vocabulary) for _ in range(6)]
    said = draw.choices(some, k=draw.randrange(9))
    words = [tuple(draw.choices(some, k=draw.randrange(1, 4))) for _ in range(draw.randrange(4))]
    params = SamplingParams(
        max_tokens=99,
        temperature=draw.choice([0.0, 0.0, 0.8]),
        top_k=draw.choice([0, 5]),
        seed=row,
        repetition_penalty=draw.choice([1.0, 1.3, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.4, -0.2]),
        presence_penalty=draw.choice([0.0, 0.6]),
        logit_bias=tuple((t, draw.uniform(-4, 4)) for t in set(draw.choices(some, k=3))),
        min_tokens=draw.choice([0, 0, 5]),
        stop_token_ids=tuple(some[:2]),
        bad_words=tuple(words),
        no_repeat_ngram=no_repeat(draw.choice([2, 3]), draw.choice([4, 7, 9]), some[:1])
        if draw.random() < 0.4
        else None,
        allowed_token_ids=tuple(range(0, vocabulary, 3)) if draw.random() < 0.2 else (),
        num_logprobs=draw.choice([-1, 0, 3]),
    )
    allowed = None
    if draw.random() < 0.3:
        bits = np.frombuffer(draw.randbytes(-(-vocabulary // 8)), np.uint8)
        allowed = lambda: bits  # noqa: E731
    prompt = tuple(draw.choices(some, k=4))
    return SampleRequest(params, len(said), prompt, said, allowed)


def no_repeat(size: int, window: int, whitelist: Iterable[int] = ()) -> NoRepeat:
    return NoRepeat(ngram_size=size, window_size=window, whitelist_token_ids=tuple(whitelist))


def on_its_way(asked: SampleRequest, source: int) -> tuple[SampleRequest, int]:
    """The same, with its last token not known yet: it is this row of the step before."""
    *said, last = asked.output_ids
    return replace(asked, output_ids=said, pending=source), last


def plainly(logits: torch.Tensor, asked: SampleRequest) -> torch.Tensor:
    """One row `[vocabulary]`, rule by rule, as the parameters are defined."""
    logits, params, said = logits.clone(), asked.params, list(asked.output_ids)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*asked.prompt_ids, *said}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(said):
        by = torch.tensor(params.frequency_penalty) * said.count(token)
        logits[token] -= by + params.presence_penalty
    for token in params.stop_token_ids if asked.output_index < params.min_tokens else ():
        logits[token] = -torch.inf
    for word in params.bad_words:
        if said[len(said) - len(word) + 1 :] == list(word[:-1]) and len(word) <= len(said) + 1:
            logits[word[-1]] = -torch.inf
    logits[list(repeating(said, params.no_repeat_ngram))] = -torch.inf
    if params.allowed_token_ids:
        logits[[t for t in range(len(logits)) if t not in params.allowed_token_ids]] = -torch.inf
    if asked.allowed is not None:
        logits[unpacked(asked.allowed(), len(logits)) == 0] = -torch.inf
    return logits


def repeating(said: Sequence[int], rule: NoRepeat | None) -> set[int]:
    """Tokens behind which a run of the answer's last tokens would stand there twice."""
    if rule is None:
        return set()
    size, window = rule.ngram_size, list(said[-rule.window_size :])
    runs = {tuple(window[at : at + size]) for at in range(len(window) - size + 1)}
    begun = tuple(window[len(window) - size + 1 :])
    return {run[-1] for run in runs if run[:-1] == begun} - {*rule.whitelist_token_ids}


def unpacked(bits: Bits, size: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little"))


def some_wishes(seed: int, count: int, vocabulary: int) -> list[SampleRequest]:
    draw = random.Random(seed)
    return [wish(draw, vocabulary, row) for row in range(count)]


def delayed(
    asked: Sequence[SampleRequest], device: str = "cpu"
) -> tuple[list[SampleRequest], torch.Tensor]:
    """Every second one's last token is on its way; and what the step before sampled."""
    waiting = list(asked)
    sampled = torch.full((2 * len(asked),), 1)
    for row, request in enumerate(asked):
        if row % 2 and request.output_ids:
            waiting[row], sampled[row + 3] = on_its_way(request, row + 3)
    return waiting, sampled.to(device)


@pytest.mark.parametrize("seed", range(40))
def test_all_rows_at_once_are_as_row_by_row(seed: int) -> None:
    asked = some_wishes(seed, 8, VOCABULARY)
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    none = torch.empty(0, dtype=torch.int64)
    found = LogitRules(asked, VOCABULARY).apply(logits, none)
    expected = torch.stack([plainly(*pair) for pair in zip(logits, asked, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    waiting, sampled = delayed(asked)
    assert torch.equal(LogitRules(waiting, VOCABULARY).apply(logits, sampled), found)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(20))
def test_a_token_on_its_way_changes_no_outcome(seed: int) -> None:
    asked = some_wishes(seed, 12, VOCABULARY)
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    waiting, sampled = delayed(asked)
    outcome = Draft(logits, waiting, sampled).finish()
    assert [outcome(row) for row in range(12)] == sample(logits, asked)


def test_a_grammar_that_cannot_go_on_fails_alone() -> None:
    def stuck() -> Bits:
        raise ValueError("the answer left its grammar")

    asked = [SampleRequest(SamplingParams(max_tokens=2), 0, allowed=stuck), *some_wishes(1, 2, 9)]
    logits = torch.randn(3, 9)
    failed, *others = sample(logits, asked)
    assert failed == StepFailure("the answer left its grammar", by_rules=True)
    assert others == sample(logits[1:], asked[1:])


FEW = st.integers(0, 3)  # tokens, so that runs are repeated


@given(st.lists(FEW, max_size=24), st.integers(2, 6), st.integers(0, 20), st.sets(FEW))
def test_no_run_is_said_twice_but_for_the_whitelist(
    said: list[int], ngram_size: int, more: int, whitelist: set[int]
) -> None:
    rule = no_repeat(ngram_size, ngram_size + more, whitelist)
    asked = SampleRequest(SamplingParams(max_tokens=99, no_repeat_ngram=rule), len(said), (), said)
    waiting, sampled = [asked], torch.tensor([9])
    if said:
        later, last = on_its_way(asked, 1)
        waiting, sampled = [later], torch.tensor([9, last])
    for rows in ([asked], waiting):
        found = LogitRules(rows, 5).apply(torch.zeros(1, 5), sampled)[0]
        assert {*found.isneginf().nonzero().flatten().tolist()} == repeating(said, rule)
