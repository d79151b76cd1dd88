"""The most valuable test of the data plane: both ends of a room, over every interleaving.

Safety: slots and source are never given back while a write may touch them; each owner hears exactly
one outcome.  Liveness: from every reachable moment there is a way to quiescence.  And the search
itself is tested: with a bug of the catalogue put back into the table it must find a path.
"""

from __future__ import annotations

import pytest

from epd.fsm import transfer as t
from epd.fsm import transfer_failures as failures
from epd.fsm import transfer_parts
from epd.fsm.kernel import Row, Table, TableError, unless
from epd.fsm.transfer import Do, S, is_consumer
from epd.fsm.transfer_table import TABLE
from epd_lab.sim.model.explore import Mode, explore
from epd_lab.sim.model.laws import Violation
from epd_lab.sim.model.pair import PairModel, Scenario
from epd_lab.sim.model.scenarios import EVERYTHING, TRANSFER, Search
from tests.fsm.mutants import patched
from tests.fsm.searches import searched

CALM = {"may_die": False, "may_be_declared_lost": False}


DEEPER = (  # whose parts are searched by others
    "unknown outcomes, words lost for good",
    "kv in parts, unknown outcomes",
    "words lost for good, kv",
)


@pytest.mark.parametrize(
    "search",
    [
        pytest.param(s, id=s.name, marks=[pytest.mark.long] if s.name in DEEPER else [])
        for s in TRANSFER
    ],
)
def test_every_interleaving_keeps_the_laws_and_can_end(search: Search) -> None:
    assert searched(search).num_edges > len(searched(search).parents)


def test_delivery_and_every_kind_of_end_are_reached() -> None:
    """The model is not vacuous: both ends reach every state that the table has for them."""
    space = searched(TRANSFER[0])
    producers, consumers = {S.PARKED, S.WRITING}, set(TABLE.states) - {S.STREAMING}
    assert {pair.producer.state for pair in space.parents} == consumers
    assert {pair.consumer.state for pair in space.parents} == consumers - producers
    parts = searched(next(search for search in TRANSFER if search.name == "kv in parts"))
    streaming = [pair for pair in parts.parents if pair.producer.state is S.STREAMING]
    assert any(pair.landed_nbytes for pair in parts.parents) and streaming
    assert any(pair.consumer.memory == "published" for pair in space.parents)
    assert any(pair.write == "zombie" for pair in space.parents)


def test_an_unknown_outcome_stays_owned_while_both_ends_live() -> None:
    """No word and no timer frees memory that a zombie write may touch: only its end, or a fence
    (F7, F8)."""
    scenario = Scenario(engine_is_certain=False, engine_settles=False, **CALM)
    space = explore(PairModel(scenario))
    stuck = space.stuck()
    assert stuck
    assert all(p.write == "zombie" and p.producer.state is S.QUARANTINED for p in stuck)
    assert {p.producer.memory for p in stuck} == {"owned"}
    assert {p.consumer.memory for p in stuck} == {"owned"}


# --- mutants --------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[list[tuple[S, type]], list[Row]]] = {
    "F6: cancel is acknowledged while the write runs": (
        [(S.WRITING, t.CancelReceived)],
        [
            Row(
                S.WRITING,
                t.CancelReceived,
                S.CANCELLED,
                (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED),
            )
        ],
    ),
    "F7: the consumer's slots are freed after a grace": (
        [(S.EXPIRE_PENDING, t.GraceEnded)],
        [
            Row(S.EXPIRE_PENDING, t.GraceEnded, S.EXPIRED, (Do.RELEASE_SLOTS,), when=is_consumer),
            Row(
                S.EXPIRE_PENDING,
                t.GraceEnded,
                S.QUARANTINED,
                (Do.START_FENCE,),
                when=unless(is_consumer),
            ),
        ],
    ),
    "F7: lost is taken for dead": (
        [(S.RESERVED, t.PeerLost)],
        [
            Row(
                S.RESERVED,
                t.PeerLost,
                S.FAILED,
                (Do.CONCLUDE_FAILED, Do.RELEASE_SLOTS),
                when=is_consumer,
            ),
            Row(S.RESERVED, t.PeerLost, S.FAILED, (Do.CONCLUDE_FAILED,), when=unless(is_consumer)),
        ],
    ),
    "F8: the source is freed after an unknown outcome": (
        [(S.WRITING, t.WriteOutcomeUnknown)],
        [
            Row(
                S.WRITING,
                t.WriteOutcomeUnknown,
                S.FAILED,
                (Do.RELEASE_SOURCE, Do.SEND_ABORT, Do.CONCLUDE_FAILED),
            )
        ],
    ),
    "F8: the slots are freed by the word of a doubt": (
        [(S.RESERVED, t.DoubtReceived)],
        [
            Row(
                S.RESERVED,
                t.DoubtReceived,
                S.FAILED,
                (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED),
                failures.keep_failure,
            )
        ],
    ),
    "F8: a cancel is acknowledged while the outcome is unknown": (
        [(S.QUARANTINED, t.CancelReceived)],
        [Row(S.QUARANTINED, t.CancelReceived, None, (Do.SEND_CANCEL_ACK,))],
    ),
    "F11: a grant of other rows is written to": (
        [(S.PARKED, t.GrantReceived)],
        [
            Row(
                S.PARKED,
                t.GrantReceived,
                S.WRITING,
                (Do.START_WRITE,),
                transfer_parts.write_granted,
            )
        ],
    ),
    "F28: a commit before the last part has landed": (
        [(S.WRITING, t.WriteSucceeded)],
        [
            Row(
                S.WRITING,
                t.WriteSucceeded,
                S.COMPLETE,
                (Do.SEND_COMMIT, Do.ARM_RETRY),
                transfer_parts.keep_written,
            )
        ],
    ),
    "F42: a cancel before the grant leaves no tombstone": (
        [(S.PENDING, t.CancelReceived)],
        [Row(S.PENDING, t.CancelReceived, None, (Do.SEND_CANCEL_ACK,))],
    ),
    "the owner is told twice": (
        [(S.CANCEL_PENDING, t.WriteSucceeded)],
        [
            Row(
                S.CANCEL_PENDING,
                t.WriteSucceeded,
                S.CANCELLED,
                (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED),
            )
        ],
    ),
}


SHOWN_BY = {
    "F11": Scenario(rows_granted=3),
    "F28": Scenario(offers=True, in_parts=True, **CALM),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_a_bug_put_back(name: str) -> None:
    remove, rows = MUTANTS[name]
    table = patched(TABLE, remove, rows)
    scenario = SHOWN_BY.get(name[:3], Scenario(engine_is_certain=False, may_be_declared_lost=True))
    with pytest.raises(Violation, match="after"):
        explore(PairModel(scenario, table))


def test_the_search_finds_a_retry_that_is_missing() -> None:
    """With words lost for good, a cancel that is not repeated leaves slots owned for ever."""
    remove = [(state, t.RetryDue) for state in (S.CANCEL_PENDING, S.EXPIRE_PENDING, S.QUARANTINED)]
    rows = [
        Row((S.CANCEL_PENDING, S.EXPIRE_PENDING), t.RetryDue, None),
        Row(S.QUARANTINED, t.RetryDue, None, (Do.START_FENCE,)),
    ]
    space = explore(PairModel(Scenario(forgetful=True, **CALM), patched(TABLE, remove, rows)))
    assert space.stuck()


@pytest.mark.parametrize("side", ["a grant", "a commit"])
def test_timers_last_finds_a_hang_that_only_a_deadline_ends(side: str) -> None:
    """No law breaks when a lost word is not repeated; but not all succeed any more."""
    state = S.RESERVED if side == "a grant" else S.COMPLETE
    cells = [(state, t.RetryDue)]
    if side == "a commit":
        cells.append((state, t.GrantReceived))
    rows = [Row(state, event, None) for _, event in cells]
    scenario = Scenario(forgetful=True, max_lost=4, **CALM)
    space = explore(PairModel(scenario, patched(TABLE, cells, rows)), Mode.TIMERS_LAST)
    with pytest.raises(Violation, match="no way to success"):
        space.require_good_ends()


def test_counterexamples_are_stable() -> None:
    remove, rows = MUTANTS["F7: lost is taken for dead"]
    told = set()
    for _ in range(2):
        with pytest.raises(Violation) as caught:
            explore(PairModel(EVERYTHING, patched(TABLE, remove, rows)))
        told.add(str(caught.value))
    assert len(told) == 1


def test_a_tombstone_cannot_be_revived() -> None:
    """F42 put back as a row is refused at import: no edge leaves a terminal state."""
    with pytest.raises(TableError, match="leaves the terminal state CANCELLED"):
        patched(
            TABLE,
            [(S.CANCELLED, t.GrantReceived)],
            [Row(S.CANCELLED, t.GrantReceived, S.RESERVED)],
        )


def test_an_unpatched_table_survives_patching() -> None:
    """`patched` itself changes nothing that it was not asked to change."""
    same: Table = patched(TABLE, [], [])
    assert same.dispatch.keys() == TABLE.dispatch.keys()
    for state in TABLE.states:
        assert same.dispatch[state].keys() == TABLE.dispatch[state].keys()
