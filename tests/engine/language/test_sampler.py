"""The sampler: each knob against its definition, and draws that depend on (seed, index) alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.engine.base import StepFailure
from epd.engine.language.logit_rules import SampleRequest
from epd.engine.language.sampler import uniform
from epd.messages import SamplingParams, TokenLogprobs
from tests.engine.language.sampling import sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def request(index: int = 0, prompt: Any = (), output: Any = (), **params: Any) -> SampleRequest:
    return SampleRequest(SamplingParams(**{"max_tokens": 100} | params), index, prompt, output)


def one(logits: torch.Tensor, wish: SampleRequest) -> TokenLogprobs:
    (outcome,) = sample(logits[None], [wish])
    assert isinstance(outcome, TokenLogprobs), outcome
    return outcome


def frequencies(logits: torch.Tensor, draws: int = 3000, **params: Any) -> dict[int, float]:
    """Share of each token over the output indices of one seed."""
    wishes = [request(i, temperature=1.0, seed=11, **params) for i in range(draws)]
    counts = Counter(
        outcome.token_id
        for outcome in sample(logits.expand(draws, -1), wishes)
        if isinstance(outcome, TokenLogprobs)
    )
    return {token: count / draws for token, count in counts.items()}


def assert_distribution(found: dict[int, float], weights: list[float]) -> None:
    """Each share within five standard deviations of the renormalised weights; none elsewhere."""
    total = sum(weights)
    for token, weight in enumerate(weights):
        expected = weight / total
        tolerance = 5 * math.sqrt(expected * (1 - expected) / 3000)
        assert abs(found.get(token, 0.0) - expected) <= tolerance, token


@pytest.mark.parametrize(
    "params", [{}, {"num_logprobs": 3}, {"temperature": 0.9}, {"repetition_penalty": 1.3}]
)
def test_logits_of_sixteen_bits_are_used_in_thirty_two(params: dict[str, Any]) -> None:
    """What a head gives in 16 bits is what 32 bits of the same value would be."""
    few = (torch.linspace(-3, 3, 50) + LOGITS.repeat(9)[:50]).bfloat16().expand(20, -1)
    wishes = [request(i, seed=5, prompt=(3,), output=(4, 9), **params) for i in range(20)]
    assert sample(few, wishes) == sample(few.float(), wishes)


PROBABILITIES = LOGITS.double().softmax(-1).tolist()


def test_greedy_is_argmax() -> None:
    assert one(LOGITS, request()).token_id == 0
    assert one(LOGITS, request(repetition_penalty=1.0, num_logprobs=0)).token_id == 0


def test_temperature_one_draws_the_softmax() -> None:
    assert_distribution(frequencies(LOGITS), PROBABILITIES)


def test_temperature_flattens() -> None:
    half = (LOGITS.double() / 2).softmax(-1).tolist()
    wishes = [request(i, temperature=2.0, seed=5) for i in range(3000)]
    counts = Counter(o.token_id for o in sample(LOGITS.expand(3000, -1), wishes))  # type: ignore[union-attr]
    assert_distribution({t: c / 3000 for t, c in counts.items()}, half)


def test_top_k_keeps_the_likeliest() -> None:
    assert_distribution(frequencies(LOGITS, top_k=2), [*PROBABILITIES[:2], 0, 0, 0, 0])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    kept = 1 + sum(sum(PROBABILITIES[: i + 1]) < 0.88 for i in range(6))
    assert kept == 3
    assert_distribution(frequencies(LOGITS, top_p=0.88), [*PROBABILITIES[:3], 0, 0, 0])


def test_top_p_is_taken_of_what_top_k_left() -> None:
    found = frequencies(LOGITS, top_k=2, top_p=0.7)  # 0.73 of the two belongs to the first
    assert found == {0: 1.0}


def test_tiny_top_p_is_greedy() -> None:
    assert frequencies(LOGITS, draws=50, top_p=1e-9) == {0: 1.0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    limit = 0.3 * PROBABILITIES[0]
    weights = [p if p >= limit else 0.0 for p in PROBABILITIES]
    assert sum(w > 0 for w in weights) == 2
    assert_distribution(frequencies(LOGITS, min_p=0.3), weights)


def test_penalties_change_the_choice() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0])
    assert one(logits, request(repetition_penalty=1.2, prompt=[0])).token_id == 1
    assert one(logits, request(frequency_penalty=0.06, output=[0, 0])).token_id == 1
    assert one(logits, request(frequency_penalty=0.06, output=[0])).token_id == 0
    assert one(logits, request(presence_penalty=0.2, output=[0])).token_id == 1
    assert one(logits, request(presence_penalty=0.2, prompt=[0])).token_id == 0
    negative = torch.tensor([-1.0, -1.1])
    assert one(negative, request(repetition_penalty=1.2, output=[0])).token_id == 1


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [3, 1, 1, 4]
    expected = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([ids]), LOGITS[None].clone())
    wish = request(repetition_penalty=3.0, prompt=ids[:2], output=ids[2:])
    assert one(LOGITS, wish).token_id == int(expected.argmax())
    shares = frequencies(LOGITS, repetition_penalty=3.0, prompt=ids[:2], output=ids[2:])
    assert_distribution(shares, expected[0].double().softmax(-1).tolist())


def test_logit_bias_forces_and_forbids() -> None:
    assert one(LOGITS, request(logit_bias=((5, 100.0),))).token_id == 5
    assert 0 not in frequencies(LOGITS, draws=300, logit_bias=((0, -100.0),))


def test_nothing_but_the_allowed_tokens_is_said() -> None:
    assert one(LOGITS, request(allowed_token_ids=(2, 3), logit_bias=((0, 50.0),))).token_id == 2
    assert set(frequencies(LOGITS, 300, allowed_token_ids=(1, 3))) == {1, 3}


def test_the_last_token_of_a_bad_word_is_not_said() -> None:
    def said(*output: int, words: tuple[tuple[int, ...], ...]) -> int:
        wish = SampleRequest(SamplingParams(max_tokens=9, bad_words=words), 2, (), output)
        return one(LOGITS, wish).token_id

    assert said(5, 7, words=((0,),)) == 1
    assert said(5, 7, words=((7, 0),)) == 1
    assert said(5, 7, words=((5, 7, 0), (1,))) == 2
    assert said(7, 5, words=((7, 0),)) == 0
    assert said(words=((7, 0),)) == 0


def test_nothing_left_to_say_fails_alone() -> None:
    wish = request(allowed_token_ids=(1,), bad_words=((1,),))
    failed, well = sample(LOGITS.expand(2, -1), [wish, request()])
    assert isinstance(failed, StepFailure) and "bad_words" in failed.reason
    assert isinstance(well, TokenLogprobs)


def test_min_tokens_forbids_the_end() -> None:
    wish = {"min_tokens": 3, "stop_token_ids": (0, 1)}
    assert one(LOGITS, request(2, **wish)).token_id == 2
    assert one(LOGITS, request(3, **wish)).token_id == 0


def test_logprobs_are_of_the_raw_distribution() -> None:
    expected = LOGITS.log_softmax(-1)
    found = one(LOGITS, request(num_logprobs=2, logit_bias=((5, 100.0),), temperature=0.5))
    assert found.token_id == 5
    assert found.logprob == pytest.approx(float(expected[5]))
    assert [token for token, _ in found.top] == [0, 1]
    assert [value for _, value in found.top] == pytest.approx(expected[:2].tolist())
    assert one(LOGITS, request(num_logprobs=0)).top == ()
    assert len(one(LOGITS, request(num_logprobs=50)).top) == len(LOGITS)


def test_logprobs_by_id_are_those_of_the_whole_softmax() -> None:
    """Beside rows that ask for the likeliest, or for nothing; by rules and drawn, as any."""
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(3)) * 4
    expected = logits.double().log_softmax(-1)
    wishes = [
        request(num_logprobs=0, logprob_token_ids=(7,)),
        request(num_logprobs=2),
        request(num_logprobs=5, logprob_token_ids=(49, 0, 7)),
        request(),
        request(num_logprobs=0, logprob_token_ids=tuple(range(50)), temperature=1.0),
        request(num_logprobs=0),
        request(num_logprobs=1, logprob_token_ids=(3, 4), allowed_token_ids=(8,)),
    ]
    for row, outcome in enumerate(sample(logits, wishes)):
        assert isinstance(outcome, TokenLogprobs)
        params = wishes[row].params
        likeliest = expected[row].topk(max(params.num_logprobs, 0)).indices.tolist()
        ids = list(params.logprob_token_ids) or likeliest
        assert [token for token, _ in outcome.top] == ids
        assert [value for _, value in outcome.top] == pytest.approx(expected[row, ids].tolist())
        if params.num_logprobs >= 0:
            assert outcome.logprob == pytest.approx(float(expected[row, outcome.token_id]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    outcomes = sample(logits, [request(), request(temperature=1.0), request(num_logprobs=1)])
    assert isinstance(outcomes[1], StepFailure)
    assert [type(outcomes[i]) for i in (0, 2)] == [TokenLogprobs] * 2


def test_what_names_tokens_outside_the_vocabulary_fails_alone() -> None:
    outcomes = sample(LOGITS.repeat(2, 1), [request(logit_bias=((6, 1.0),)), request()])
    assert isinstance(outcomes[0], StepFailure) and "token 6" in outcomes[0].reason
    assert isinstance(outcomes[1], TokenLogprobs)
    wishes = [request(num_logprobs=0, logprob_token_ids=ids) for ids in ((1, 6), (5,))]
    outcomes = sample(LOGITS.repeat(2, 1), wishes)
    assert isinstance(outcomes[0], StepFailure) and "token 6" in outcomes[0].reason
    assert isinstance(outcomes[1], TokenLogprobs) and [t for t, _ in outcomes[1].top] == [5]


# --- reproducibility ------------------------------------------------------------------------------


def test_the_draw_is_a_fixed_function() -> None:
    """Written down: another release or platform that changes these changes every seeded answer."""
    assert uniform(0, 0) == 0.1709622343137528
    assert uniform(2**63 + 1, 7) == 0.1137829237717537
    assert uniform(1, 23) != uniform(12, 3)


@given(st.integers(0, 2**64), st.integers(0, 10**6))
def test_the_draw_is_in_range(seed: int, index: int) -> None:
    assert 0.0 <= uniform(seed, index) < 1.0


def test_the_batch_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=generator)
    wishes = [request(i, temperature=0.9, seed=i % 3, top_p=0.95) for i in range(20)]
    together = sample(logits, wishes)
    alone = [sample(logits[i : i + 1], [wishes[i]])[0] for i in range(20)]
    assert together == alone
    order = list(reversed(range(20)))
    assert sample(logits[order], [wishes[i] for i in order]) == [together[i] for i in order]
