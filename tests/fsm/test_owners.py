"""Owners are data: what follows from them, and each law of theirs with a table that breaks it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from epd.fsm.kernel import Effect, Event, Ignore, Machine, Owned, Row, State, Table, TableError


class Give(Effect):
    BACK = "give the tool back"
    OUT = "leave the room"
    ON = "give the tool to another"
    TELL = "say something"


class Own(Owned):
    ROOM = "a room", Give.OUT
    TOOL = "a tool", Give.BACK, Give.ON
    HAND = "a hand that is in a machine"


class At(State):
    NEW = "came"
    IN = "is in the room", Own.ROOM
    WORKS = "works", Own.TOOL, Own.ROOM
    STUCK = "waits for the machine", Own.HAND, Own.ROOM
    GONE = "went"


class Came(Event):
    pass


class ToolBrought(Event):
    brings = (Own.TOOL,)


class ToolLost(Event):
    ends = (Own.TOOL,)


class Reached(Event):
    brings = (Own.HAND,)


class HandFree(Event):
    ends = (Own.HAND,)


class Late(Event):
    by_time = True


OWNERS = (
    Row(At.NEW, Came, At.IN, (Give.TELL,)),
    Row(At.IN, ToolBrought, At.WORKS),
    Row(At.WORKS, ToolLost, At.IN),
    Row(At.WORKS, Came, At.IN, (Give.ON,)),
    Row((At.IN, At.WORKS), Reached, At.STUCK),
    Row(At.STUCK, HandFree, At.GONE),
    Row((At.NEW, At.IN, At.WORKS), Late, At.GONE, (Give.TELL,)),
    Row(At.STUCK, Late, None, (Give.TELL,)),
    Row(At.GONE, ToolBrought, None, note="too late"),
)


def owners(*rows: Row, without: tuple[Row, ...] = (), ignores: Iterable[Ignore] = ()) -> Table:
    kept = [row for row in OWNERS if row not in without]
    held = {At.STUCK: "the machine has the hand"}
    return Table("OWNER", "", At, At.NEW, [At.GONE], [*kept, *rows], ignores, held)


def test_what_the_target_does_not_own_is_given_back_first_in_the_order_of_what_is_owned() -> None:
    class Owner(Machine):
        __slots__ = ()
        table = owners()

    machine = Owner("o")
    happened = [machine.fire(event) for event in (Came(), ToolBrought(), Late(), ToolBrought())]
    assert happened == [(Give.TELL,), (), (Give.OUT, Give.BACK, Give.TELL), (Give.BACK,)]
    told = [effects for row, effects in owners().told_rows() if Late in row.events]
    assert told == [
        (Give.TELL,),
        (Give.OUT, Give.TELL),
        (Give.OUT, Give.BACK, Give.TELL),
        (Give.TELL,),
    ]
    assert owners().owned == (Own.ROOM, Own.TOOL, Own.HAND)


def test_what_an_event_has_ended_or_a_row_passes_on_is_not_given_back() -> None:
    effects = {(source, call.event): call.effects for source, call in owners().cells()}
    assert effects[At.WORKS, ToolLost] == ()
    assert effects[At.WORKS, Came] == (Give.ON,)
    assert effects[At.STUCK, HandFree] == (Give.OUT,)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(At.STUCK, Came, At.GONE), "STUCK x Came -> GONE: HAND has no way back"),
        (Row(At.STUCK, Came, At.IN), "STUCK x Came -> IN: HAND has no way back"),
        (
            Row(At.IN, Came, At.GONE, (Give.OUT,)),
            "IN x Came -> GONE: OUT follows from what is owned",
        ),
        (Row(At.STUCK, Came, None, (Give.ON,)), "TOOL is passed on and not parted with"),
        (Row(At.STUCK, ToolLost, At.WORKS), "STUCK x ToolLost -> WORKS: HAND has no way back"),
        (Row(At.IN, ToolLost, At.WORKS), "TOOL is owned by WORKS, and the event has ended it"),
    ],
)
def test_a_row_that_parts_with_what_is_owned_in_a_wrong_way(row: Row, why: str) -> None:
    with pytest.raises(TableError, match=why):
        owners(row)


def test_who_has_ended_owns_nothing() -> None:
    with pytest.raises(TableError, match="the terminal state IN owns ROOM"):
        Table("OWNER", "", At, At.NEW, [At.IN], [Row(At.NEW, Late, At.IN)])


@pytest.mark.parametrize(("state", "event"), [(At.NEW, ToolBrought), (At.WORKS, ToolLost)])
def test_what_changes_owners_is_not_ignored(state: State, event: type[Event]) -> None:
    rows = () if state is At.NEW else OWNERS[2:3]
    with pytest.raises(TableError, match=f"ignores {event.__name__}, which changes who owns TOOL"):
        owners(without=rows, ignores=[Ignore((state,), (event,), "whatever")])
