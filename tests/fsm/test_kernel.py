"""The kernel's laws, each with a table that breaks it, and what `fire` promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from epd.fsm.kernel import (
    STORY_LENGTH,
    Effect,
    Event,
    GuardCall,
    Ignore,
    IllegalEvent,
    Machine,
    Row,
    State,
    Table,
    TableError,
    Timers,
    unless,
)


class S(State):
    IDLE = "owns nothing"
    BUSY = "owns a hand"
    DONE = "owns nothing again"


class Do(Effect):
    WORK = "work"
    REST = "rest"


@dataclass(slots=True)
class Started(Event):
    amount: int = 0


@dataclass(slots=True)
class Finished(Event):
    pass


@dataclass(slots=True)
class TimePassed(Event):
    by_time = True


@dataclass(slots=True)
class Strange(Event):
    pass


def is_big(machine: Any, event: Any) -> bool:
    return event.amount > 10


def is_small(machine: Any, event: Any) -> bool:
    return event.amount <= 10


def count(machine: Any, event: Any) -> None:
    machine.total += event.amount


GOOD = (
    Row(S.IDLE, Started, S.BUSY, (Do.WORK,), count, is_big),
    Row(S.IDLE, Started, None, (Do.REST,), count, unless(is_big)),
    Row(S.IDLE, TimePassed, S.DONE),
    Row(S.BUSY, Finished, S.DONE, (Do.REST, Do.WORK)),
    Row(S.BUSY, TimePassed, S.DONE),
    Row(S.DONE, Finished, None, (Do.REST,), note="answers late"),
)


def table(
    rows: Iterable[Row] = GOOD,
    ignores: Iterable[Ignore] = (),
    terminal: Iterable[State] = (S.DONE,),
    held: Mapping[State, str] | None = None,
    timers: Timers | None = None,
) -> Table:
    return Table("WORKER", "A worker.", S, S.IDLE, terminal, rows, ignores, held, timers)


def rows_without(*left_out: Row) -> list[Row]:
    return [row for row in GOOD if row not in left_out]


class Worker(Machine):
    __slots__ = ("total",)
    table = table(ignores=[Ignore((S.DONE,), (TimePassed,), "it has ended")])

    def __init__(self, key: str, *journal: Any) -> None:
        super().__init__(key, *journal)
        self.total = 0


# --- laws -----------------------------------------------------------------------------------------


def test_a_good_table_is_accepted() -> None:
    made = table()
    assert made.events == (Started, TimePassed, Finished)
    assert made.effects == (Do.WORK, Do.REST)
    assert (made.theory, made.held) == ("A worker.", {})


def test_an_unreachable_state() -> None:
    with pytest.raises(TableError, match="WORKER: unreachable: BUSY"):
        table([Row(S.IDLE, TimePassed, S.DONE), Row(S.BUSY, TimePassed, S.DONE)])


def test_a_trap() -> None:
    rows = [*rows_without(*GOOD[3:5]), Row(S.BUSY, TimePassed, None, (Do.WORK,))]
    with pytest.raises(TableError, match="no way to a terminal state from BUSY"):
        table(rows, held={S.BUSY: "because"})


def test_an_edge_out_of_a_terminal_state() -> None:
    with pytest.raises(TableError, match="an edge leaves the terminal state DONE"):
        table([*GOOD, Row(S.DONE, Started, S.BUSY)])


@pytest.mark.parametrize(
    "guards",
    [
        (is_big,),
        (is_big, is_small),
        (unless(is_big), is_big),
        (is_big, None),
        (is_big, unless(is_small)),
        (is_big, unless(is_big), is_small),
        (None, None),
    ],
    ids=["half", "look alike", "reversed", "half and all", "of another", "three", "twice"],
)
def test_guards_that_are_not_a_predicate_and_its_complement(guards: tuple[Any, ...]) -> None:
    halves = [Row(S.IDLE, Started, S.BUSY, when=guard) for guard in guards]
    with pytest.raises(TableError, match="IDLE x Started: "):
        table([*rows_without(*GOOD[:2]), *halves])


def test_an_event_that_is_both_a_row_and_ignored() -> None:
    with pytest.raises(TableError, match="BUSY x Finished is both a row and ignored"):
        table(ignores=[Ignore((S.BUSY,), (Finished,), "whatever")])


def test_a_state_without_an_exit_by_time() -> None:
    with pytest.raises(TableError, match=r"no exit by time \(fault F15\): BUSY"):
        table(rows_without(GOOD[4]))


def test_staying_by_time_is_no_exit() -> None:
    rows = [*rows_without(GOOD[4]), Row(S.BUSY, TimePassed, S.BUSY, (Do.WORK,))]
    with pytest.raises(TableError, match=r"no exit by time \(fault F15\): BUSY"):
        table(rows)


def test_a_held_state_must_try_again_by_time() -> None:
    with pytest.raises(TableError, match="no exit by time"):
        table(rows_without(GOOD[4]), held={S.BUSY: "because"})
    idle_retry = [*rows_without(GOOD[4]), Row(S.BUSY, TimePassed, None)]
    with pytest.raises(TableError, match="no exit by time"):
        table(idle_retry, held={S.BUSY: "because"})
    retry = [*rows_without(GOOD[4]), Row(S.BUSY, TimePassed, None, (Do.WORK,))]
    assert table(retry, held={S.BUSY: "because"}).held == {S.BUSY: "because"}


def test_a_row_of_several_events_is_a_row_for_each() -> None:
    rows = [*rows_without(*GOOD[3:5]), Row(S.BUSY, (Finished, TimePassed), S.DONE, (Do.REST,))]
    made = table(rows)
    assert [r.events for r in made.rows_of(S.BUSY, TimePassed)] == [(Finished, TimePassed)]
    assert made.dispatch[S.BUSY][Finished] == made.dispatch[S.BUSY][TimePassed]


# --- fire -----------------------------------------------------------------------------------------


def test_fire_takes_the_row_whose_guard_holds() -> None:
    """IDLE -> IDLE -> BUSY -> DONE."""
    worker = Worker("w")
    assert worker.fire(Started(3)) == (Do.REST,)
    assert worker.state is S.IDLE
    assert worker.fire(Started(30)) == (Do.WORK,)
    assert worker.state is S.BUSY and not worker.terminal
    assert worker.fire(Finished()) == (Do.REST, Do.WORK)
    assert worker.terminal
    assert worker.total == 33


def test_a_terminal_state_may_answer_and_ignore() -> None:
    worker = Worker("w")
    worker.fire(TimePassed())
    assert worker.fire(Finished()) == (Do.REST,)
    assert worker.fire(TimePassed()) == ()
    assert worker.state is S.DONE


def test_an_event_of_another_machine_is_illegal() -> None:
    with pytest.raises(IllegalEvent, match="WORKER w: Strange is illegal in IDLE"):
        Worker("w").fire(Strange())


def test_a_timer_runs_where_it_has_a_row_and_changes_nothing_elsewhere() -> None:
    made = table(timers={TimePassed: ()})
    assert [TimePassed in made.running[state] for state in S] == [True, True, False]
    ignored = made.ignore_of(S.DONE, TimePassed)
    assert ignored is not None and "does not run" in ignored.reason


def test_the_first_state_has_an_exit_by_time_too() -> None:
    rows = (Row(S.IDLE, Started, S.BUSY, (Do.WORK,)), Row(S.BUSY, TimePassed, S.DONE))
    with pytest.raises(TableError, match=r"no exit by time.*IDLE"):
        table(rows, timers={TimePassed: (Do.WORK,)})


def test_what_is_armed_runs() -> None:
    with pytest.raises(TableError, match="arms TimePassed, of which DONE has no row"):
        table(timers={TimePassed: (Do.WORK,)})


def test_an_exit_by_time_is_one_whose_timer_is_armed_whatever_led_there() -> None:
    start, waits = GOOD[0], Row(S.BUSY, TimePassed, S.DONE)
    others = (Row(S.IDLE, TimePassed, S.DONE), waits, Row(S.BUSY, Finished, S.DONE))
    timers = {TimePassed: (Do.WORK,)}
    table((Row(S.IDLE, Started, S.BUSY, (Do.WORK,)), *others), timers=timers)
    for unarmed in (
        (Row(S.IDLE, Started, S.BUSY), *others),
        (start, Row(S.IDLE, Started, S.BUSY, when=unless(is_big)), *others),
        (
            Row(S.IDLE, Started, S.BUSY, (Do.WORK,)),
            Row(S.BUSY, TimePassed, None, when=is_big),
            Row(S.BUSY, TimePassed, S.DONE, when=unless(is_big)),
            *(others[0], others[2]),
        ),
    ):
        with pytest.raises(TableError, match=r"no exit by time.*BUSY.*none"):
            table(unarmed, timers=timers)


def test_the_state_is_written_by_fire_alone() -> None:
    worker = Worker("w")
    with pytest.raises(AttributeError):
        worker.state = S.DONE  # type: ignore[misc]


def test_the_story_is_bounded_and_keeps_the_end() -> None:
    class Pacing(Machine):
        __slots__ = ()
        table = Table(
            "PACING",
            "",
            S,
            S.IDLE,
            [S.DONE],
            [
                Row(S.IDLE, Started, S.BUSY),
                Row(S.BUSY, Finished, S.IDLE),
                Row((S.IDLE, S.BUSY), TimePassed, S.DONE),
            ],
        )

    machine = Pacing("p")
    for _ in range(STORY_LENGTH):
        machine.fire(Started())
        machine.fire(Finished())
    machine.fire(TimePassed())
    assert len(machine.story) == STORY_LENGTH
    assert machine.story[-1][1:] == ("IDLE", "TimePassed", "DONE", 1)


def test_what_repeats_is_one_line_of_the_story() -> None:
    worker = Worker("w")
    for _ in range(3 * STORY_LENGTH):
        worker.fire(Started())
    assert [entry[1:] for entry in worker.story] == [("IDLE", "Started", "IDLE", 3 * STORY_LENGTH)]


def test_what_takes_turns_is_a_line_each() -> None:
    """Steps and tokens, while a request decodes."""

    class Turning(Machine):
        __slots__ = ()
        table = Table(
            "TURNING",
            "",
            S,
            S.IDLE,
            [S.DONE],
            [
                Row(S.IDLE, (Started, Finished), None),
                Row(S.IDLE, TimePassed, S.BUSY),
                Row(S.BUSY, TimePassed, S.DONE),
            ],
        )

    machine = Turning("t")
    for _ in range(STORY_LENGTH):
        machine.fire(Started())
        machine.fire(Finished())
    assert [entry[1:] for entry in machine.story] == [
        ("IDLE", "Started", "IDLE", STORY_LENGTH),
        ("IDLE", "Finished", "IDLE", STORY_LENGTH),
    ]


def test_an_event_that_repeats_elsewhere_or_leads_on_is_a_line_of_its_own() -> None:
    class Turning(Machine):
        __slots__ = ()
        table = Table(
            "TURNING",
            "",
            S,
            S.IDLE,
            [S.DONE],
            [
                Row(S.IDLE, Started, S.BUSY, when=is_big),
                Row(S.IDLE, Started, None, when=unless(is_big)),
                Row(S.IDLE, Finished, None),
                Row(S.BUSY, Started, None),
                Row((S.IDLE, S.BUSY), TimePassed, S.DONE),
            ],
        )

    machine = Turning("t")
    for event in (Started(), Finished(), Started(), Started(11), Started(), Started()):
        machine.fire(event)
    assert [entry[1:] for entry in machine.story] == [
        ("IDLE", "Started", "IDLE", 2),
        ("IDLE", "Finished", "IDLE", 1),
        ("IDLE", "Started", "BUSY", 1),
        ("BUSY", "Started", "BUSY", 2),
    ]


def test_rows_and_guards_have_names_for_images() -> None:
    assert unless(is_big).__name__ == "not is_big"
    assert GuardCall(is_big).__name__ == "is_big"
    calls = [call for _, call in table().cells()]
    names = [calls[place].__name__ for place in (0, 2, 3)]
    assert names == ["WORK", "-", "REST, WORK"]
