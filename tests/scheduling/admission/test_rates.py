"""Buckets of a key: never more than a minute's worth and the refill, and times that are kept."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.admission.rates import MINUTE_S, Bucket

pytestmark = pytest.mark.hypothesis

asks = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 40)), max_size=60)


@given(st.integers(1, 600), asks)
def test_what_is_admitted_keeps_the_rate(per_minute: int, given_: list[tuple[float, int]]) -> None:
    """In any time it is at most what fits, what came in meanwhile, and one that is too large."""
    bucket, now_s = Bucket(per_minute, 5.0), 5.0
    taken: list[tuple[float, int]] = []
    for pause_s, amount in given_:
        now_s += pause_s
        if not bucket.wait_s(amount, now_s):
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            lasted_s = taken[last][0] - taken[first][0]
            too_large = max(0, taken[last][1] - per_minute)
            most = per_minute * (1 + lasted_s / MINUTE_S) + too_large
            assert sum(amount for _, amount in taken[first : last + 1]) <= most + 1e-3


@given(st.integers(1, 600), st.integers(0, 60), st.lists(st.integers(1, 40), max_size=20))
def test_who_comes_back_when_it_was_told_is_admitted(
    per_minute: int, spent: int, amounts: list[int]
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    bucket.take(per_minute + spent, now_s)
    told: list[tuple[float, int]] = []
    for amount in amounts:
        wait_s = bucket.promise_s(amount, now_s)
        assert wait_s >= bucket.wait_s(amount, now_s) > 0
        told.append((max(1, math.ceil(wait_s)), amount))
    in_all_s = (sum(amounts) + spent + 1) * MINUTE_S / per_minute
    assert all(at_s <= math.ceil(in_all_s) + 1 for at_s, _ in told)  # and no later than needed
    if sum(amounts) * MINUTE_S / per_minute > MINUTE_S:
        return  # more than a minute of promises is not made
    for at_s, amount in sorted(told):
        assert bucket.wait_s(amount, at_s) == 0
        bucket.take(amount, at_s)


def test_who_asks_again_and_again_waits_for_a_minute_more_at_most() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    waits = [bucket.promise_s(1, 0.0) for _ in range(200)]
    assert waits[:3] == [1.0, 2.0, 3.0] and max(waits) == 62.0


def test_what_was_not_used_comes_back() -> None:
    bucket = Bucket(100, 0.0)
    bucket.take(100, 0.0)
    bucket.take(-90, 1.0)
    assert bucket.wait_s(91, 1.0) == 0 and bucket.level(1e9) == 100


# --- how a bug would show -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["never_refills", "constant"])
def test_a_bug_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "constant":
        monkeypatch.setattr(Bucket, "promise_s", lambda *_: 1.0)
    else:
        monkeypatch.setattr(Bucket, "level", lambda self, now_s: self._level)
    bucket, outcomes = Bucket(60, 0.0), Counter[bool]()
    bucket.take(60, 0.0)
    for at_s in sorted(math.ceil(bucket.promise_s(1, 0.0)) for _ in range(5)):
        outcomes[fits := not bucket.wait_s(1, at_s)] += 1
        bucket.take(fits, at_s)
    assert outcomes[False]
