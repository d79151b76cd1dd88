"""The most valuable test of the data plane: both ends of a room, over every interleaving.

Safety: slots and source are never given back while a write may touch them; each owner hears exactly
one outcome.  Liveness: from every reachable moment there is a way to quiescence.  And the search
itself is tested: with a bug of the catalogue put back into the table it must find a path.
"""

from __future__ import annotations

import pytest

from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import room as r
from epd.fsm.kernel import Event, Row, State, Table, TableError
from epd_lab.sim.model.ends import Scenario
from epd_lab.sim.model.explore import Mode, explore
from epd_lab.sim.model.laws import Violation
from epd_lab.sim.model.pair import PairModel
from epd_lab.sim.model.scenarios import EVERYTHING, TRANSFER, Search
from tests.fsm.mutants import patched
from tests.fsm.searches import searched

CALM = {"may_die": False, "may_be_declared_lost": False}


DEEPER = (  # whose parts are searched by others
    "unknown outcomes, messages lost for good",
    "kv in parts, unknown outcomes",
    "messages lost for good, kv",
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
    producers = set(o.TABLE.states) - {o.S.STREAMING}
    assert {pair.producer.state for pair in space.parents} == producers
    consumers = set(i.TABLE.states)
    assert {pair.consumer.state for pair in space.parents} == consumers - {i.S.AWAITING_LANDING}
    parts = searched(next(search for search in TRANSFER if search.name == "kv in parts"))
    streaming = [pair for pair in parts.parents if pair.producer.state is o.S.STREAMING]
    assert any(pair.landed_nbytes for pair in parts.parents) and streaming
    assert {pair.consumer.state for pair in parts.parents} >= {i.S.AWAITING_LANDING}
    assert any(pair.consumer.memory == "published" for pair in space.parents)
    assert any(pair.write == "zombie" for pair in space.parents)


def test_an_unknown_outcome_stays_owned_while_both_ends_live() -> None:
    """No message and no timer frees memory that a zombie write may touch: only its end, or a fence
    (F7, F8)."""
    scenario = Scenario(engine_is_certain=False, engine_settles=False, **CALM)
    space = explore(PairModel(scenario))
    stuck = space.stuck()
    assert stuck
    assert all(p.write == "zombie" and p.producer.state is o.S.QUARANTINED for p in stuck)
    assert {p.producer.memory for p in stuck} == {"owned"}
    assert {p.consumer.memory for p in stuck} == {"owned"}


# --- mutants --------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[Table, list[tuple[State, type[Event]]], list[Row]]] = {
    "F6: cancel is acknowledged while the write runs": (
        o.TABLE,
        [(o.S.WRITING, o.CancelReceived)],
        [
            Row(
                o.S.WRITING,
                o.CancelReceived,
                o.S.CANCELLED,
                (o.Do.RELEASE_SOURCE, o.Do.SEND_CANCEL_ACK, o.Do.CONCLUDE_FAILED),
            )
        ],
    ),
    "F7: the consumer's slots are freed after a grace": (
        i.TABLE,
        [(i.S.EXPIRE_PENDING, r.GraceEnded)],
        [Row(i.S.EXPIRE_PENDING, r.GraceEnded, i.S.EXPIRED, (i.Do.RELEASE_SLOTS,))],
    ),
    "F7: lost is taken for dead": (
        i.TABLE,
        [(i.S.RESERVED, r.PeerLost)],
        [
            Row(
                i.S.RESERVED,
                r.PeerLost,
                i.S.FAILED,
                (i.Do.CONCLUDE_FAILED, i.Do.RELEASE_SLOTS),
            )
        ],
    ),
    "F8: the source is freed after an unknown outcome": (
        o.TABLE,
        [(o.S.WRITING, o.WriteOutcomeUnknown)],
        [
            Row(
                o.S.WRITING,
                o.WriteOutcomeUnknown,
                o.S.FAILED,
                (o.Do.RELEASE_SOURCE, o.Do.SEND_ABORT, o.Do.CONCLUDE_FAILED),
            )
        ],
    ),
    "F8: the slots are freed by the message of a doubt": (
        i.TABLE,
        [(i.S.RESERVED, i.DoubtReceived)],
        [
            Row(
                i.S.RESERVED,
                i.DoubtReceived,
                i.S.FAILED,
                (i.Do.RELEASE_SLOTS, i.Do.CONCLUDE_FAILED),
                r.keep_failure,
            )
        ],
    ),
    "F8: a cancel is acknowledged while the outcome is unknown": (
        o.TABLE,
        [(o.S.QUARANTINED, o.CancelReceived)],
        [Row(o.S.QUARANTINED, o.CancelReceived, None, (o.Do.SEND_CANCEL_ACK,))],
    ),
    "F11: a grant of other rows is written to": (
        o.TABLE,
        [(o.S.PARKED, o.GrantReceived)],
        [
            Row(
                o.S.PARKED,
                o.GrantReceived,
                o.S.AWAITING_SLOTS,
                (o.Do.LEASE_SLOTS,),
                o.write_granted,
            )
        ],
    ),
    "F28: a commit before the last part has landed": (
        o.TABLE,
        [(o.S.WRITING, o.WriteSucceeded)],
        [
            Row(
                o.S.WRITING,
                o.WriteSucceeded,
                o.S.WRITTEN,
                (o.Do.SEND_COMMIT, o.Do.ARM_RETRY),
                o.keep_written,
            )
        ],
    ),
    "F42: a cancel before the grant leaves no tombstone": (
        o.TABLE,
        [(o.S.PENDING, o.CancelReceived)],
        [Row(o.S.PENDING, o.CancelReceived, None, (o.Do.SEND_CANCEL_ACK,))],
    ),
    "the owner is told twice": (
        o.TABLE,
        [(o.S.CANCEL_PENDING, o.WriteSucceeded)],
        [
            Row(
                o.S.CANCEL_PENDING,
                o.WriteSucceeded,
                o.S.CANCELLED,
                (o.Do.RELEASE_SOURCE, o.Do.SEND_CANCEL_ACK, o.Do.CONCLUDE_FAILED),
            )
        ],
    ),
}


def model_with(table: Table, scenario: Scenario) -> PairModel:
    """The model in which this table stands in the place of its machine's own."""
    of = {"OUTGOING": o.TABLE, "INCOMING": i.TABLE, table.name: table}
    return PairModel(scenario, of["OUTGOING"], of["INCOMING"])


SHOWN_BY = {
    "F11": Scenario(rows_granted=3),
    "F28": Scenario(offers=True, in_parts=True, **CALM),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_a_bug_put_back(name: str) -> None:
    table = patched(*MUTANTS[name])
    scenario = SHOWN_BY.get(name[:3], Scenario(engine_is_certain=False, may_be_declared_lost=True))
    with pytest.raises(Violation, match="after"):
        explore(model_with(table, scenario))


@pytest.mark.long
def test_the_search_finds_a_retry_that_is_missing() -> None:
    """With messages lost for good, a cancel that is not repeated leaves slots owned for ever."""
    pending = (i.S.CANCEL_PENDING, i.S.EXPIRE_PENDING)
    remove = [(state, r.RetryDue) for state in (*pending, i.S.QUARANTINED)]
    rows = [
        Row(pending, r.RetryDue, None),
        Row(i.S.QUARANTINED, r.RetryDue, None, (i.Do.START_FENCE,)),
    ]
    table = patched(i.TABLE, remove, rows)
    space = explore(model_with(table, Scenario(forgetful=True, **CALM)))
    assert space.stuck()


@pytest.mark.parametrize(
    ("table", "state", "events"),
    [
        (i.TABLE, i.S.RESERVED, [r.RetryDue]),
        (o.TABLE, o.S.WRITTEN, [r.RetryDue, o.GrantReceived]),
    ],
    ids=["a grant", "a commit"],
)
def test_timers_last_finds_a_hang_that_only_a_deadline_ends(
    table: Table, state: State, events: list[type[Event]]
) -> None:
    """No law breaks when a lost message is not repeated; but not all succeed any more."""
    cells = [(state, event) for event in events]
    rows = [Row(state, event, None) for event in events]
    scenario = Scenario(forgetful=True, max_lost=4, **CALM)
    space = explore(model_with(patched(table, cells, rows), scenario), Mode.TIMERS_LAST)
    with pytest.raises(Violation, match="no way to success"):
        space.require_good_ends()


def test_counterexamples_are_stable() -> None:
    table = patched(*MUTANTS["F7: lost is taken for dead"])
    told = set()
    for _ in range(2):
        with pytest.raises(Violation) as caught:
            explore(model_with(table, EVERYTHING))
        told.add(str(caught.value))
    assert len(told) == 1


def test_a_tombstone_cannot_be_revived() -> None:
    """F42 put back as a row is refused at import: no edge leaves a terminal state."""
    with pytest.raises(TableError, match="leaves the terminal state CANCELLED"):
        patched(
            o.TABLE,
            [(o.S.CANCELLED, o.GrantReceived)],
            [Row(o.S.CANCELLED, o.GrantReceived, o.S.GRANTED)],
        )


@pytest.mark.parametrize("table", [o.TABLE, i.TABLE], ids=lambda table: table.name)
def test_an_unpatched_table_survives_patching(table: Table) -> None:
    """`patched` itself changes nothing that it was not asked to change."""
    same: Table = patched(table, [], [])
    assert same.dispatch.keys() == table.dispatch.keys()
    for state in table.states:
        assert same.dispatch[state].keys() == table.dispatch[state].keys()
