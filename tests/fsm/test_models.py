"""Small configurations of the other machines, over every interleaving of what may happen.

Each search keeps its laws and can end well from everywhere; the machines reach all their states, so
that none of it is vacuous; and with a bug put back, the search must find the way to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import generation as g
from epd.fsm import instance as i
from epd.fsm import request as r
from epd.fsm.kernel import Machine, Row, State, Table, unless
from epd.fsm.request import TABLE as REQUEST_TABLE
from epd_lab.sim.model.encoding import EncodingWorld
from epd_lab.sim.model.explore import explore
from epd_lab.sim.model.laws import Violation
from epd_lab.sim.model.request import MAX_TOKENS
from epd_lab.sim.model.scenarios import (
    EMBEDDING,
    ENCODING,
    GENERATION,
    INSTANCE,
    REQUEST,
    SEARCHES,
    Search,
)
from epd_lab.sim.model.world import WorldModel
from tests.fsm.mutants import patched
from tests.fsm.searches import searched

OTHERS = (*EMBEDDING, *ENCODING, *REQUEST, *GENERATION, *INSTANCE)
# seconds each
LARGE = (
    "a further room", "two attempts", "two requests of one hash",
    "timers last, two requests of one hash",
)  # fmt: skip


@pytest.mark.parametrize(
    "search",
    [
        pytest.param(
            search,
            id=f"{search.machine}: {search.name}",
            marks=[pytest.mark.long] if search.name in LARGE else [],
        )
        for search in OTHERS
    ],
)
def test_every_interleaving_keeps_the_laws_and_can_end(search: Search) -> None:
    assert len(searched(search).parents) >= search.at_least


def test_every_machine_is_searched() -> None:
    machines = {"transfer", "embedding", "encoding", "request", "generation", "instance"}
    assert {search.machine for search in SEARCHES} == machines


REACHED: list[Any] = [  # the last: left within the step that enters them
    (
        tuple(search for search in EMBEDDING if search.name not in LARGE),
        m.Embedding.table,
        lambda w: [w.embedding],
        {m.S.FAILED, m.S.EVICTED},
    ),  # replaced at once
    (ENCODING, e.Encoding.table, lambda w: [w.encoding], {e.S.FAILED, e.S.EVICTED}),
    (REQUEST, REQUEST_TABLE, lambda w: [w.request], set()),
    pytest.param(
        GENERATION,
        g.Generation.table,
        lambda w: [w.generation],
        set(),
        marks=pytest.mark.long,
    ),  # it takes two attempts
    (
        INSTANCE,
        i.Instance.table,
        lambda w: list(w.machines.values()),
        {i.S.JOINING, i.S.AWAITING_NAME},
    ),  # within a step; and of two who live at once
]


@pytest.mark.parametrize(("searches", "table", "machines", "not_at_rest"), REACHED)
def test_every_state_is_reached(
    searches: tuple[Search, ...],
    table: Table,
    machines: Callable[[Any], list[Machine]],
    not_at_rest: set[State],
) -> None:
    reached = {
        machine.state
        for search in searches
        for world in searched(search).parents
        for machine in machines(world)
    }
    assert reached == set(table.states) - not_at_rest


# --- bugs put back --------------------------------------------------------------------------------

Bug = tuple[tuple[Search, ...], type[Machine], list[Any], list[Row]]
_FREE = (r.Do.DEQUEUE, r.Do.RELEASE_BLOCKS, r.Do.SEND_ABORTED)
_LAST = (r.Do.DEQUEUE, r.Do.RELEASE_BLOCKS, r.Do.EMIT_TOKENS)
_CLOSE = (g.Do.CLOSE,)


def append_later_token(generation: g.Generation, event: g.TokensMissed) -> None:
    generation.token_ids.append(MAX_TOKENS - 1)


BUGS: dict[str, Bug] = {
    "F6: blocks are freed when the client leaves, step or not": (
        REQUEST,
        r.Request,
        [(r.S.DECODING, r.AbortReceived)],
        [Row(r.S.DECODING, r.AbortReceived, r.S.FINISHED, _FREE)],
    ),
    "F6: a last token frees the blocks that the step ahead writes into": (
        REQUEST,
        r.Request,
        [(r.S.DECODING, r.LastTokenSampled)],
        [
            Row(
                r.S.DECODING,
                r.LastTokenSampled,
                r.S.FINISHING,
                (*_LAST, r.Do.ARM_GRACE),
                r.keep_last_token,
                when,
            )
            for when in (r.in_another_step, unless(r.in_another_step))
        ],
    ),
    "decode is lost while preempted, and the table does not know": (
        REQUEST,
        r.Request,
        [(r.S.PREEMPTED, r.KvFailed)],
        [],
    ),
    "F20: a hole in the tokens is passed on": (
        GENERATION,
        g.Generation,
        [(g.S.PLACED, g.TokensMissed)],
        [Row(g.S.PLACED, g.TokensMissed, None, (g.Do.DELIVER,), append_later_token)],
    ),
    "F4: rows that nobody waits for any more count as run ahead": (
        ENCODING,
        e.Encoding,
        [(e.S.RESIDENT, e.RoomClosed)],
        [Row(e.S.RESIDENT, e.RoomClosed, None, (), e.remove_room)],
    ),
    "F21: rows that nobody waits for are not kept in the books": (
        ENCODING,
        e.Encoding,
        [(e.S.ABANDONED, e.EncodeSucceeded)],
        [Row(e.S.ABANDONED, e.EncodeSucceeded, e.S.RESIDENT, (), e.keep_rows)],
    ),
    "F21: rows that arrive for nobody are forgotten with their slots": (
        EMBEDDING,
        m.Embedding,
        [(m.S.ABANDONED, m.Loaded)],
        [Row(m.S.ABANDONED, m.Loaded, m.S.EVICTED)],
    ),
    "F22: a new waiter of an abandoned load starts another one": (
        EMBEDDING,
        m.Embedding,
        [(m.S.ABANDONED, m.Wanted)],
        [Row(m.S.ABANDONED, m.Wanted, m.S.REQUESTED, (m.Do.OPEN_TRANSFER,), m.begin)],
    ),
    "F23: rows are evicted though somebody waits": (
        EMBEDDING,
        m.Embedding,
        [(m.S.RESIDENT, m.EvictionRequested)],
        [Row(m.S.RESIDENT, m.EvictionRequested, m.S.EVICTED, (m.Do.RELEASE_ROWS,))],
    ),
    "F37: a second room of a hash is encoded anew": (
        ENCODING,
        e.Encoding,
        [(e.S.ENCODING, e.Requested)],
        [Row(e.S.ENCODING, e.Requested, e.S.QUEUED, (e.Do.START_PREPROCESS,), e.add_room)],
    ),
    "a follower is not told that the rows are there": (
        EMBEDDING,
        m.Embedding,
        [(m.S.RESIDENT, m.Wanted)],
        [Row(m.S.RESIDENT, m.Wanted, None, (), m.add_waiter)],
    ),
    "F40: a failed attempt ends as finished, without an answer": (
        GENERATION,
        g.Generation,
        [(g.S.PLACED, g.AttemptFailed)],
        [
            Row(g.S.PLACED, g.AttemptFailed, g.S.MIGRATING, (g.Do.PLACE,), when=g.may_retry),
            Row(g.S.PLACED, g.AttemptFailed, g.S.FINISHED, _CLOSE, when=unless(g.may_retry)),
        ],
    ),
    "F43: the client leaves and nobody is told": (
        GENERATION,
        g.Generation,
        [(g.S.PLACED, g.CancelRequested)],
        [Row(g.S.PLACED, g.CancelRequested, g.S.CANCELLING)],
    ),
    "F44: a life that is replaced leaves its attempts waiting": (
        INSTANCE,
        i.Instance,
        [(i.S.HEALTHY, i.EpochReplaced)],
        [Row(i.S.HEALTHY, i.EpochReplaced, i.S.LOST, (i.Do.PUBLISH, i.Do.DISCONNECT))],
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_search_finds_a_bug_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, kind, remove, rows = BUGS[name]
    monkeypatch.setattr(kind, "table", patched(kind.table, remove, rows))
    with pytest.raises(Violation):
        for search in reversed(searches):  # the largest finds most of them at once
            search.run()


def test_rows_stay_while_a_cancelled_write_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """F31, as this model found it: a room that was told to stop no longer pinned its rows."""
    monkeypatch.setattr(
        EncodingWorld, "conclude_failed", lambda self, transfer, event: self._close(transfer.key)
    )
    with pytest.raises(Violation, match="still read"):
        explore(WorldModel(lambda: EncodingWorld(("a",))))
