"""Keys that always wait get equal seconds, whatever their requests cost, and however many."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.admission.fairness import FairQueue

pytestmark = pytest.mark.hypothesis

PRICES = (1.0, 0.0)
costs = st.lists(st.floats(0.001, 0.5), min_size=1, max_size=40)
lines = st.dictionaries(st.sampled_from("abcde"), costs, min_size=2)


def filled(asked: dict[str, list[float]]) -> tuple[FairQueue, dict[str, float]]:
    queue, cost_of = FairQueue(), dict[str, float]()
    for who, waiting in asked.items():
        for n, cost_s in enumerate(waiting):
            cost_of[f"{who}{n}"] = cost_s
            queue.join(f"{who}{n}", who, 0.0, (cost_s, 1.0))
    return queue, cost_of


def unfairness(asked: dict[str, list[float]]) -> float:
    """The most that one key got more than another while both waited, beyond what must be."""
    queue, cost_of = filled(asked)
    left = {who: len(waiting) for who, waiting in asked.items()}
    got_s, worst_s = Counter[str](), 0.0
    while (key := queue.take(PRICES)) is not None:
        got_s[key[0]] += cost_of[key]
        left[key[0]] -= 1
        if not all(left.values()):
            break
        spread_s = max(got_s[who] for who in asked) - min(got_s[who] for who in asked)
        worst_s = max(worst_s, spread_s)
    return worst_s - 3 * max(cost_of.values())


@given(lines)
def test_keys_that_wait_get_equal_seconds(asked: dict[str, list[float]]) -> None:
    assert unfairness(asked) <= 1e-6


@given(lines, st.sets(st.integers(0, 39)))
def test_each_leaves_once_in_the_order_of_its_line(
    asked: dict[str, list[float]], leaving: set[int]
) -> None:
    queue, _ = filled(asked)
    for n in leaving:
        queue.leave(f"a{n}")
        queue.leave(f"a{n}")
    expected = {
        who: [f"{who}{n}" for n in range(len(waiting)) if who != "a" or n not in leaving]
        for who, waiting in asked.items()
    }
    assert len(queue) == sum(map(len, expected.values()))
    assert queue.cost_s(PRICES) <= sum(map(sum, asked.values())) + 1e-6
    taken: list[str] = []
    while (key := queue.take(PRICES)) is not None:
        taken.append(key)
    assert {who: [k for k in taken if k[0] == who] for who in asked} == expected
    assert not queue._lines and not queue._saved_s and not queue._who


def test_rank_counts_within_a_line_alone() -> None:
    queue = FairQueue()
    queue.join("slow", "a", 10.0, (0.01, 0.0))
    queue.join("urgent", "a", -10.0, (0.01, 0.0))
    queue.join("other", "b", 99.0, (0.01, 0.0))
    queue.join("endless", "c", 0.0, (1e12, 0.0))
    taken = [queue.take(PRICES) for _ in range(5)]
    assert taken[:3] == ["urgent", "slow", "other"] and taken[3:] == ["endless", None]


@pytest.mark.parametrize("bug", ["cost_is_ignored", "one_line"])
def test_a_bug_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    join = FairQueue.join
    if bug == "one_line":
        monkeypatch.setattr(FairQueue, "join", lambda s, k, w, r, c: join(s, k, "", r, c))
    else:
        monkeypatch.setattr(FairQueue, "join", lambda s, k, w, r, c: join(s, k, w, r, (1.0, 0.0)))
    assert unfairness({"a": [0.5] * 20, "b": [0.01] * 40}) > 0.1
