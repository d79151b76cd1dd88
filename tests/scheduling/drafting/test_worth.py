"""Drafts stay on where they pay, go off where they do not; trials of the other way are cheap."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.scheduling.drafting.worth import (
    FIRST,
    LINGER,
    MOST,
    MOST_TURNS,
    SHARE,
    UNCOUNTED,
    WAITS,
    DraftWorth,
)

PLAIN_S = 0.01


class Instance:
    """Steps that take so long, and drafts that hold so often."""

    def __init__(self, num_decoding: int, seed: int = 0) -> None:
        self.worth, self.num_decoding = DraftWorth(), num_decoding
        self.random = random.Random(seed)
        self.tokens = self.elapsed_s = 0.0

    def turn(self, factor: float, accepted: float, stalls: float = 0.0) -> bool:
        """`factor`: of a drafted step's time; `accepted`: drafts of each sequence that hold."""
        drafts = self.worth.pays(self.num_decoding, self.num_decoding)
        held = self.random.random() * 2 * accepted if drafts else 0.0
        tokens = round(self.num_decoding * (1 + held))
        elapsed_s = PLAIN_S * (factor if drafts else 1.0)
        if self.random.random() < stalls:
            elapsed_s *= 50
        self.worth.observe(self.num_decoding, tokens, elapsed_s)
        self.tokens, self.elapsed_s = self.tokens + tokens, self.elapsed_s + elapsed_s
        return drafts


@given(
    st.integers(1, 128), st.floats(1.0, 4.0), st.floats(0.0, 3.0), st.integers(0, 99),
    st.sampled_from([0.0, 0.05]),
)  # fmt: skip
@settings(max_examples=60)
def test_the_faster_way_is_in_use(
    num_decoding: int, factor: float, accepted: float, seed: int, stalls: float
) -> None:
    """Once both were tried, where they differ by more than a third; steps that stall change
    nothing."""
    gain = (1 + accepted) / factor
    instance = Instance(num_decoding, seed)
    ways = [instance.turn(factor, accepted, stalls) for _ in range(800)]
    if gain > 1.5 or gain < 0.66:
        assert sum(way == (gain > 1) for way in ways[200:]) > 0.9 * 600


@given(st.integers(8, 128), st.floats(1.5, 4.0), st.integers(0, 99))
@settings(max_examples=20)
def test_where_drafts_never_hold_they_cost_next_to_nothing(
    num_decoding: int, factor: float, seed: int
) -> None:
    instance = Instance(num_decoding, seed)
    for _ in range(300):
        instance.turn(factor, 0.0)
    instance.tokens = instance.elapsed_s = 0.0
    for _ in range(2 * MOST):
        instance.turn(factor, 0.0)
    assert instance.tokens / instance.elapsed_s > 0.98 * num_decoding / PLAIN_S


@given(st.booleans(), st.integers(0, 99))
@settings(max_examples=20)
def test_a_change_of_texts_is_seen(pays_first: bool, seed: int) -> None:
    """By the next trial, which may be far where many have confirmed."""
    instance = Instance(16, seed)
    for _ in range(200):
        instance.turn(2.0, 3.0 if pays_first else 0.0)
    assert instance.turn(2.0, 3.0 if pays_first else 0.0) == pays_first
    ways = [instance.turn(2.0, 0.0 if pays_first else 3.0) for _ in range(4 * 8 * FIRST)]
    assert ways[-1] != pays_first


def test_loads_are_apart() -> None:
    """Many sequences may have none while one has some."""
    worth = DraftWorth()
    for _ in range(10 * (FIRST + MOST_TURNS + UNCOUNTED)):
        for count, factor in ((1, 1.1), (64, 4.0)):
            for _ in range(2 * UNCOUNTED):
                drafts = worth.pays(count, count)
                tokens, took = (2 * count, factor) if drafts else (count, 1.0)
                worth.observe(count, tokens, took)
    assert worth.pays(1, 1)
    assert not worth.pays(64, 64)


class Followed:
    """Where a layer drafts, which follows requests of so many tokens from their beginning."""

    def __init__(self, length: int, num_decoding: int = 16) -> None:
        self.worth, self.length = DraftWorth(), length
        self.left = [1 + length * n // num_decoding for n in range(num_decoding)]
        self.followed = [True] * num_decoding

    def turn(self, accepted: float) -> tuple[bool, bool]:
        """Whether it drafts; and whether the layer follows though nobody does."""
        num = len(self.left)
        drafts = self.worth.pays(num, sum(self.followed))
        is_kept = drafts or self.worth.is_kept
        self.followed = [followed and is_kept for followed in self.followed]
        share = sum(self.followed) / num if drafts else 0.0
        self.worth.observe(num, round(num * (1 + share * accepted)), PLAIN_S * (1 + share / 2))
        for n in range(num):
            self.left[n] -= 1
            if not self.left[n]:
                self.left[n], self.followed[n] = self.length, True
        return drafts, is_kept and not drafts


def behind_trials(length: int) -> Followed:
    """Drafts have been tried there, and none held."""
    instance = Followed(length)
    for _ in range(300):
        instance.turn(0.0)
    return instance


@given(st.integers(16, 4000))
@settings(max_examples=20)
def test_a_layer_that_nobody_needs_is_left_out(length: int) -> None:
    """But for one turn in SHARE, in which it follows requests for a trial."""
    instance = behind_trials(length)
    turns = [instance.turn(0.0) for _ in range(4 * MOST)]
    assert sum(kept for _, kept in turns) < len(turns) / SHARE + WAITS + 5 * LINGER
    assert sum(drafts for drafts, _ in turns) < 0.01 * len(turns)


@given(st.integers(16, 2000))
@settings(max_examples=10)
def test_a_layer_that_was_left_out_comes_back(length: int) -> None:
    """For requests that begin: those that ran meanwhile have no rows of it."""
    instance = behind_trials(length)
    for _ in range(SHARE * 8 * MOST):
        drafts, _ = instance.turn(3.0)
        if drafts:
            assert 2 * sum(instance.followed) >= len(instance.followed)
            break
    ways = [instance.turn(3.0)[0] for _ in range(8 * FIRST)]
    assert sum(ways) > 0.8 * len(ways)
