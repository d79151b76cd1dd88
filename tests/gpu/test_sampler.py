"""The sampler on a GPU chooses what it chooses on a CPU."""

from __future__ import annotations

import pytest
import torch

from epd.engine.base import StepFailure
from epd.engine.language.logit_rules import LogitRules, SampleRequest
from epd.engine.language.sampler import Draft
from epd.messages import SamplingParams, TokenLogprobs
from tests.engine.language.sampling import sample
from tests.engine.language.test_logit_rules import delayed, some_wishes

VOCABULARY = 151936
WISHES = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05, "num_logprobs": 5},
    {"temperature": 0.8, "top_k": 1000, "num_logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "num_logprobs": 2},
    {"temperature": 0.9, "num_logprobs": 1, "logprob_token_ids": (VOCABULARY - 1, 0, 7)},
)


def test_tokens_are_those_of_the_cpu(cuda: str) -> None:
    """Logits of bf16, so that many tie; all wishes in one batch, with numbers of their own."""
    generator = torch.Generator().manual_seed(3)
    rows = 12 * len(WISHES)
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * 4).bfloat16().float()
    requests = [
        SampleRequest(SamplingParams(max_tokens=1, seed=row, **WISHES[row % len(WISHES)]), row)
        for row in range(rows)
    ]
    expected = sample(logits, requests)
    device = logits.to(cuda)
    torch.cuda.synchronize()
    outcomes = []
    for start in range(0, rows, 21):  # in batches of another size
        outcomes += sample_on(device[start : start + 21], requests[start : start + 21])
    for found, wanted in zip(outcomes, expected, strict=True):
        assert isinstance(found, TokenLogprobs) and isinstance(wanted, TokenLogprobs)
        assert found.token_id == wanted.token_id
        assert abs(found.logprob - wanted.logprob) < 1e-4
        likeliest = [[value for _, value in outcome.top] for outcome in (found, wanted)]
        assert likeliest[0] == pytest.approx(likeliest[1], abs=1e-4)


def test_rules_are_those_of_the_cpu(cuda: str) -> None:
    """Bias, penalties, bad words and masks, half of the rows with a token on its way: the tokens,
    log-probabilities and failures of the CPU, and no row comes to the host."""
    generator = torch.Generator().manual_seed(5)
    rows = 64
    asked = some_wishes(7, rows, VOCABULARY)
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * 4).bfloat16().float()
    expected = sample(logits, asked)
    waiting, sampled = delayed(asked, cuda)
    for requests in (asked, waiting):
        draft = Draft(logits.to(cuda), requests, sampled)
        torch.cuda.synchronize()
        outcome = draft.finish()
        for row, wanted in enumerate(expected):
            found = outcome(row)
            if isinstance(wanted, StepFailure):
                assert found == wanted
                continue
            assert isinstance(found, TokenLogprobs)
            assert found.token_id == wanted.token_id
            assert abs(found.logprob - wanted.logprob) < 1e-4
    exact = LogitRules(asked, VOCABULARY).apply(logits, sampled.cpu())
    assert torch.equal(LogitRules(waiting, VOCABULARY).apply(logits.to(cuda), sampled).cpu(), exact)


def sample_on(logits: torch.Tensor, requests: list[SampleRequest]) -> list[object]:
    draft = Draft(logits, requests)
    torch.cuda.synchronize()
    outcome = draft.finish()
    return [outcome(row) for row in range(len(requests))]
