"""Filters against their definitions, and draws in proportion."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.language.sampler import uniform
from epd.engine.language.token_draw import Filtered, draw, filtered
from epd.messages import SamplingParams


def plainly(row: list[float], wish: SamplingParams) -> set[int]:
    """What may be drawn, by definition, one token after the other."""
    temperature = wish.temperature
    shares = [math.exp((logit - max(row)) / temperature) for logit in row]
    order = sorted(range(len(row)), key=lambda token: -row[token])
    order = [token for token in order if shares[token] >= wish.min_p]
    order = order[: wish.top_k] if wish.top_k > 0 else order
    total, mass, lowest = sum(shares[token] for token in order), 0.0, math.inf
    for token in order:
        if mass < wish.top_p * total or wish.top_p >= 1.0 or lowest == math.inf:
            lowest = row[token]
        mass += shares[token]
    return {token for token, logit in enumerate(row) if logit >= lowest}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_filters_are_their_definitions(data: st.DataObject) -> None:
    """Rows of all wishes together, with ties, for sizes that are cut into chunks and others."""
    size = data.draw(st.sampled_from((1, 7, 50, 256, 1024, 1024 + 64)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    wishes = [
        SamplingParams(
            max_tokens=1,
            temperature=data.draw(st.sampled_from((0.3, 1.0, 2.0))),
            top_k=data.draw(st.sampled_from((0, 0, 1, 3, 20, 2000))),
            top_p=data.draw(st.sampled_from((1.0, 1.0, 0.05, 0.81, 0.953))),
            min_p=data.draw(st.sampled_from((0.0, 0.0, 0.11, 0.57))),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    coarse = data.draw(st.sampled_from((1.0, 8.0, 1000.0)))  # steps between logits: many tie
    logits = (torch.randn(len(wishes), size, generator=generator) * 3 * coarse).round() / coarse
    rows = filtered(logits, wishes)
    weights = rows.weights(logits)
    for row, wish in enumerate(wishes):
        values = logits[row].tolist()
        found = set(weights[row].nonzero()[:, 0].tolist())
        assert found == plainly(values, wish), wish
        drawn = weights[row] > 0
        expected = ((logits[row].double() - max(values)) / wish.temperature).exp()[drawn]
        torch.testing.assert_close(weights[row, drawn].double(), expected, rtol=1e-4, atol=0)
    numbers = torch.tensor([uniform(row, 0) for row in range(len(wishes))], dtype=torch.float64)
    for row, token in enumerate(draw(logits, rows, numbers).tolist()):
        exact = weights[row].double()
        target = float(exact.sum() * numbers[row])
        assert exact[token] > 0
        assert exact[:token].sum() - 1e-9 <= target <= exact[: token + 1].sum() + 1e-9


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-6),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_never_picks_weight_zero(weights: list[float], number: float) -> None:
    tensor = torch.tensor(weights, dtype=torch.float64)
    one = torch.ones(1, 1)
    rows = Filtered(tensor.log().max() * one, one, -torch.inf * one)
    index = int(draw(tensor.log()[None], rows, torch.tensor([number], dtype=torch.float64)))
    assert tensor[index] > 0
    before, upto = tensor[:index].sum(), tensor[: index + 1].sum()
    target = number * tensor.sum()
    assert before - 1e-9 <= target <= upto + 1e-9
