"""Pools, lease lines, budgets and the order of use: the books always balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd.scheduling.pool import Budget, Lease, LeaseQueue, LruCache, Pool, PoolError
from epd.scheduling.slots import DEFAULT_ROWS, rows_per_slot, sized


def test_all_or_nothing() -> None:
    pool = Pool(3)
    assert pool.take(2) == (0, 1)
    assert pool.take(2) is None
    assert pool.num_free == 1


def test_giving_back_twice_is_a_bug_that_raises() -> None:
    pool = Pool(2)
    units = pool.take(1)
    assert units is not None
    pool.give_back(units)
    with pytest.raises(PoolError, match="not leased"):
        pool.give_back(units)


class PoolBooks(RuleBasedStateMachine):
    """Any order of taking and giving back: no unit has two owners, none is lost."""

    leases: Bundle = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(8)
        self.owned: list[int] = []

    @rule(target=leases, count=st.integers(1, 5))
    def take(self, count: int) -> tuple[int, ...]:
        units = self.pool.take(count)
        if units is None:
            assert self.pool.num_free < count
            return ()
        assert not set(units) & set(self.owned)
        self.owned.extend(units)
        return units

    @rule(units=consumes(leases))
    def give_back(self, units: tuple[int, ...]) -> None:
        self.pool.give_back(units)
        for unit in units:
            self.owned.remove(unit)

    @invariant()
    def balance(self) -> None:
        assert self.pool.num_leased == len(self.owned)
        assert self.pool.num_free + self.pool.num_leased == self.pool.size


TestPoolBooks = PoolBooks.TestCase


def test_the_line_is_fair() -> None:
    pool = Pool(4)
    line = LeaseQueue(pool, 4)
    for key, count in (("a", 3), ("b", 2), ("c", 1)):
        line.join(Lease(key, count, key))
    assert [lease.key for lease, _ in line.grants()] == ["a"]  # c does not overtake b
    assert line.wanted() == 1
    pool.give_back((0, 1, 2))
    assert [lease.key for lease, _ in line.grants()] == ["b", "c"]


def test_a_dead_encoder_cannot_starve_the_living() -> None:
    """F41: peer `dead` never settles; the line passes over what it still wants."""
    pool = Pool(4)
    line = LeaseQueue(pool, 2)
    for number in range(4):
        line.join(Lease(f"dead{number}", 1, "dead"))
    line.join(Lease("live", 2, "live"))
    granted = [lease.key for lease, _ in line.grants()]
    assert granted == ["dead0", "dead1", "live"]


def test_one_large_lease_may_exceed_the_quota_alone() -> None:
    pool = Pool(4)
    line = LeaseQueue(pool, 2)
    line.join(Lease("big", 4, "peer"))
    assert [lease.key for lease, _ in line.grants()] == ["big"]


def test_settled_peers_get_more() -> None:
    pool = Pool(4)
    line = LeaseQueue(pool, 2)
    for key in "abc":
        line.join(Lease(key, 1, "peer"))
    assert [lease.key for lease, _ in line.grants()] == ["a", "b"]
    line.settled("a")  # its bytes have landed; the slot is still owned
    assert [lease.key for lease, _ in line.grants()] == ["c"]


def test_quarantined_slots_stay_in_the_quota_of_their_peer() -> None:
    """F41, F7: nobody waits for them, and the peer may still write into them."""
    pool = Pool(4)
    line = LeaseQueue(pool, 2)
    for key in "abc":
        line.join(Lease(key, 1, "peer"))
    assert [lease.key for lease, _ in line.grants()] == ["a", "b"]
    line.strand("a")
    line.strand("c")  # has no slot yet
    assert line.num_stranded == 1
    assert list(line.grants()) == []
    line.rejoin("a")
    assert line.num_stranded == 0
    line.strand("a")
    line.settled("a")  # its writer's word, or a fence
    assert line.num_stranded == 0
    assert [lease.key for lease, _ in line.grants()] == ["c"]


def test_quarantined_slots_are_not_promised() -> None:
    """F24: what a lost encoder may still write into is nobody's; what fits beside it goes on."""
    budget = Budget(6)
    for key, count in (("big", 5), ("a", 3), ("b", 3)):
        budget.join(key, count)
    assert list(budget.grants(withheld=2)) == ["a"]
    budget.leave("a")
    assert list(budget.grants(withheld=2)) == ["b"]
    budget.leave("b")
    assert list(budget.grants()) == ["big"]


@given(
    st.lists(st.tuples(st.sampled_from("jlg"), st.integers(0, 5), st.integers(1, 6)), max_size=60)
)
def test_promises_never_exceed_the_budget(steps: list[tuple[str, int, int]]) -> None:
    budget = Budget(6)
    promised: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for verb, key_number, count in steps:
        key = str(key_number)
        if verb == "j" and key not in wanted and key not in promised:
            budget.join(key, count)
            wanted[key] = count
        elif verb == "l":
            budget.leave(key)
            wanted.pop(key, None)
            promised.pop(key, None)
        for granted in budget.grants():
            promised[granted] = wanted.pop(granted)
        assert sum(promised.values()) == budget.used <= budget.size


def test_two_requests_cannot_hold_half_of_each_other() -> None:
    """F24: with room for one of them, the second waits with nothing in its hands."""
    budget = Budget(4)
    budget.join("a", 3)
    budget.join("b", 3)
    assert list(budget.grants()) == ["a"]
    assert list(budget.grants()) == []
    budget.leave("a")
    assert list(budget.grants()) == ["b"]


def test_oldest_unreferenced_go_first_and_no_more_than_needed() -> None:
    cache = LruCache(100)
    for key in "abcd":
        cache.add(key, 10)
    cache.touch("a")
    assert cache.victims(15, lambda key: key != "b") == ["c", "d"]
    assert cache.victims(0, lambda key: True) == []
    assert cache.victims(1000, lambda key: False) == []
    cache.remove("a")
    assert cache.used == 30


def test_what_the_line_wants_is_what_its_first_lacks() -> None:
    """Eviction aims for it: of who may have slots, and nothing where nobody waits or lacks any."""
    pool = Pool(4)
    line = LeaseQueue(pool, 2)
    assert line.wanted() == 0
    line.join(Lease("a", 2, "peer"))
    assert line.wanted() == 0
    assert len(list(line.grants())) == 1
    line.join(Lease("b", 1, "peer"))  # has its quota
    line.join(Lease("c", 4, "other"))
    assert line.wanted() == 2
    line.leave("c")
    assert (line.wanted(), len(line)) == (0, 1)


def test_who_waits_again_for_a_stranded_lease_is_told_so() -> None:
    line = LeaseQueue(Pool(4), 4)
    line.join(Lease("a", 2, "peer"))
    assert list(line.grants())
    assert not line.rejoin("a"), "somebody waited all the time"
    line.strand("a")
    assert line.rejoin("a")


def test_a_settled_lease_leaves_the_rest_of_its_peers_quota_used() -> None:
    pool = Pool(9)
    line = LeaseQueue(pool, 4)
    for key, count in (("a", 1), ("b", 3), ("c", 2), ("d", 9)):
        line.join(Lease(key, count, "peer"))
    assert [lease.key for lease, _ in line.grants()] == ["a", "b"]
    line.settled("nobody's")
    line.settled("a")
    assert not list(line.grants()), "three of four are used: two more are too many"
    line.settled("b")
    line.settled("b")
    assert [lease.key for lease, _ in line.grants()] == ["c"]
    line.settled("c")
    assert not line._per_peer, "nothing is kept of a peer that holds nothing"


def test_what_just_fits_is_promised() -> None:
    budget = Budget(4)
    for key, count in (("too much", 5), ("a", 1), ("b", 3), ("c", 1)):
        budget.join(key, count)
    assert list(budget.grants()) == ["a", "b"]
    assert len(budget) == 4
    budget.leave("b")
    budget.join("whole", 4)
    assert list(budget.grants()) == ["c"]
    for key in ("a", "c"):
        budget.leave(key)
    assert list(budget.grants()) == ["whole"]


def test_who_leaves_while_others_are_promised_gets_nothing() -> None:
    budget = Budget(4)
    for key in "ab":
        budget.join(key, 1)
    for granted in budget.grants():
        assert granted == "a"
        budget.leave("b")
    assert (len(budget), budget.used) == (1, 1)


def test_one_unit_that_lacks_is_one_victim() -> None:
    cache = LruCache(2)
    for key in "ab":
        cache.add(key, 1)
    assert cache.victims(1, lambda key: True) == ["a"]


def test_sizes_follow_from_the_model_where_none_is_configured() -> None:
    assert (sized(0, 3, 4), sized(5, 3, 4)) == (12, 5)
    assert (rows_per_slot(0, 8), rows_per_slot(17, 8), rows_per_slot(7, 8)) == (DEFAULT_ROWS, 2, 1)
