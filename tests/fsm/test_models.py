"""Every model, over every interleaving of what may happen, and on random walks.

Each search keeps its laws, finds that guards and actions as data are those of Python, and can end
well from everywhere.  The machines reach all their states, so that none of it is vacuous; and with
a bug put back the search must find the way to it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import room as r
from epd.fsm.kernel import Row, Table, TableError
from epd.fsm.tables import TABLES
from epd_lab.formal import models, pair
from epd_lab.formal.explore import Mode, Space, explore
from epd_lab.formal.form import Model
from epd_lab.formal.searches import SEARCHES, Search, world_of
from epd_lab.formal.wander import replay, wander
from epd_lab.formal.world import Violation, World
from tests.foreign.mutants import UNNOTICED, noticed, shown_by, table_mutants
from tests.fsm.bugs import BUGS
from tests.fsm.mutants import patched

LARGE = (  # whose parts are searched by others
    "PAIR_HEALS",
    "PAIR_MESSAGES_LOST_IN_DOUBT",
    "PAIR_KV_IN_PARTS_IN_DOUBT",
    "PAIR_MESSAGES_LOST_KV",
)
MUTANTS = table_mutants()
NUM_WALKS = 100


@cache
def reached(search: Search) -> list[set[str]]:
    """The states of each part, when its machines have come the whole way, too."""
    space = search.run()
    if search.mode is Mode.SAFETY:
        replay(space)
    return [{node[part.state] for node in space.parents} for part in space.world.acting]


def each(searches: Iterable[Search]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "search",
        [
            pytest.param(s, id=s.title, marks=[pytest.mark.long] if s.title in LARGE else [])
            for s in searches
        ],
    )


@each(SEARCHES)
def test_every_interleaving_keeps_the_laws_and_can_end(search: Search) -> None:
    assert all(reached(search))


def test_every_machine_is_searched_and_no_count_is_of_nothing() -> None:
    tables = {part.table for model in models() for part in model.parts}
    assert tables == set(TABLES)
    assert all(len(m.nodes) == 1 + bool(m.succeeds) for m in models())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_reached_and_every_event_fired(table: Table) -> None:
    states, events = set(), set()
    for search in SEARCHES:
        parts = world_of(search.name).model.parts
        if any(part.table is table for part in parts) and search.title not in LARGE:
            number = [part.table for part in parts].index(table)
            states |= reached(search)[number]
            events |= {e for part, e in world_of(search.name).fired if part == number}
    assert states == {state.name for state in table.states}
    assert events == {event.__name__ for event in table.events}


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_a_machine_that_remembers_all_does_what_its_model_says(model: Model) -> None:
    dice = random.Random(0)
    ended = {wander(world_of(model.name), dice.randrange) for _ in range(NUM_WALKS)}
    assert len(ended) > 1


def test_an_unknown_outcome_stays_owned_while_both_ends_live() -> None:
    """No message and no timer frees memory that a zombie write may touch: only its end, or a fence
    (F7, F8)."""
    calm = pair.PairSetting(engine_is_certain=False, may_die=False, may_be_declared_lost=False)
    model = pair.pair_model("PAIR", told=calm)
    happenings = tuple(h for h in model.happenings if h.name != "write_settles")
    space = explore(World(replace(model, happenings=happenings)))
    stuck = [space.world.values(node) for node in space.stuck()]
    assert stuck
    assert {one["write"] for one in stuck} == {"zombie"}
    assert {one["producer_state"] for one in stuck} == {"QUARANTINED"}
    assert {one["producer_memory"] for one in stuck} == {"owned"}
    assert {one["consumer_memory"] for one in stuck} == {"owned"}


# --- bugs put back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in BUGS else [pytest.mark.long]) for n in MUTANTS],
)
def test_the_searches_find_a_bug_put_back(name: str) -> None:
    found = noticed(shown_by(name, MUTANTS[name]))
    assert bool(found) != (name in UNNOTICED), found or "nothing notices it"


def test_the_search_finds_a_retry_that_is_missing() -> None:
    """With messages lost for good, a cancel that is not repeated leaves slots owned for ever."""
    pending = (i.S.CANCEL_PENDING, i.S.EXPIRE_PENDING)
    remove = [(state, r.RetryDue) for state in (*pending, i.S.QUARANTINED)]
    rows = [
        Row(pending, r.RetryDue, None),
        Row(i.S.QUARANTINED, r.RetryDue, None, (i.Do.START_FENCE,)),
    ]
    of = {"INCOMING": patched(i.TABLE, remove, rows)}
    model = next(m for m in models(of) if m.name == "PAIR_MESSAGES_LOST")
    assert explore(World(model, compares=False)).stuck()


def _planted() -> Space:
    bug = patched(*BUGS["F7: lost is taken for dead"])
    return explore(
        World(pair.pair_model("PAIR", incoming=bug, told=pair.PairSetting()), compares=False)
    )


def test_counterexamples_are_stable_and_shortest() -> None:
    told = set()
    for _ in range(2):
        with pytest.raises(Violation, match=r"after\n  1\. ") as caught:
            _planted()
        told.add(str(caught.value))
    assert len(told) == 1


def test_data_that_say_another_thing_than_the_machine_are_found() -> None:
    model = next(model for model in models() if model.name == "GENERATION")
    part = replace(model.parts[0], actions={**model.parts[0].actions, "append_tokens": ()})
    with pytest.raises(Violation, match="by the data"):
        explore(World(replace(model, parts=(part,))))


def test_a_failure_without_its_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(model for model in models() if model.name == "ENCODING")
    of = World(model)
    monkeypatch.setattr("epd.fsm.encoding.note_failure.__code__", _keeps_the_first.__code__)
    with pytest.raises(Violation, match="no reason"):
        replay(explore(of))


def _keeps_the_first(encoding: object, event: object) -> None:
    encoding.image, encoding.in_batch = None, False  # type: ignore[attr-defined]


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
