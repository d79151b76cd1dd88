"""When an instance moves to where much more waits: for a while, rarely, and not back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.scaling.role_balance import LEAST_S, RATIO, Move, RoleBalance, RoleLoad

E, P, D = ("encode",), ("prefill",), ("decode",)
HOLD_S, APART_S = 10.0, 30.0


def stations(**loads: float) -> list[RoleLoad]:
    kinds = {"e": E, "p": P, "d": D}
    return [RoleLoad(name, kinds[name[0]], load_s) for name, load_s in loads.items()]


BUSY = stations(e0=9.0, d0=0.4, d1=0.2)


def test_what_lasts_moves_the_one_with_least_to_do() -> None:
    balance = RoleBalance(HOLD_S, APART_S)
    told = [balance.look(now_s, BUSY) for now_s in (0.0, 9.9, 10.0, 20.0, 39.9)]
    assert told == [None, None, Move("d1", E), None, None]
    assert balance.look(40.0, BUSY) == Move("d1", E), "moves are apart"


def test_what_does_not_last_moves_nobody() -> None:
    balance = RoleBalance(HOLD_S, APART_S)
    calm = stations(e0=0.5, d0=0.4, d1=0.2)
    for now_s in range(200):
        assert balance.look(float(now_s), BUSY if now_s % 9 else calm) is None


@pytest.mark.parametrize(
    "those",
    [
        stations(e0=9.0, d0=0.4),
        stations(e0=LEAST_S - 0.01, d0=0.0, d1=0.0),
        stations(e0=RATIO - 0.01, d0=1.0, d1=1.0),
        stations(e0=9.0),
        [],
    ],
    ids=["the last of its kind", "too little waits", "too much to do itself", "one kind", "nobody"],
)
def test_who_stays(those: list[RoleLoad]) -> None:
    balance = RoleBalance(0.0, 0.0)
    assert [balance.look(now_s, those) for now_s in (0.0, 99.0)] == [None, None]


@given(
    st.lists(st.tuples(st.sampled_from([E, P, D]), st.floats(0.0, 100.0)), min_size=1, max_size=8),
    st.floats(0.0, 60.0),
)
def test_a_move_ends_no_kind_and_is_not_taken_back(
    drawn: list[tuple[tuple[str, ...], float]], after_s: float
) -> None:
    """What waited is still there, shared out anew: nobody moves the other way."""
    here = [RoleLoad(f"i{n}", roles, load_s) for n, (roles, load_s) in enumerate(drawn)]
    balance = RoleBalance(0.0, APART_S)
    move = balance.look(0.0, here)
    if move is None:
        return
    had = Counter(one.roles for one in here)
    former = next(one.roles for one in here if one.instance == move.instance)
    assert had[former] > 1 and move.roles in had and move.roles != former
    totals = {k: sum(one.load_s for one in here if one.roles == k) for k in had}
    moved = [o._replace(roles=move.roles) if o.instance == move.instance else o for o in here]
    has = Counter(one.roles for one in moved)
    moved = [one._replace(load_s=totals[one.roles] / has[one.roles]) for one in moved]
    later = balance.look(after_s, moved)
    assert later is None or after_s >= APART_S
    later = RoleBalance(0.0, 0.0).look(0.0, moved)
    assert later is None or later.roles != former
