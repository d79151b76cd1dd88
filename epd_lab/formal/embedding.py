"""EMBEDDING as data: one hash at a prefill instance, and two rooms that wait for its rows.

A room is never used twice.  A new one may have an old letter, which is free once its waiter has
left and it is not the room of the load.
"""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import embedding as m
from epd.fsm.kernel import Event, Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

ENDED = "(FAILED, EVICTED)"
ROOMS = (("a", "b"), ("b", "a"))
UNTRIED_A = "(in_a and not tried_a)"
UNTRIED_B = "(in_b and not tried_b)"
NO_WAITERS = (
    *(f"{what}_{room} = False" for room in "ab" for what in ("wants", "in", "tried", "ready")),
    "b_first = False",
)


RACE = {
    "OPEN_RIVAL": (
        "require not promised -- two race, and not three",
        "require room != rival -- a room is used once", "rival_load = 'asked'", "promised = True",
    ),
    "CANCEL_RIVAL": (
        "require promised -- what is given back was promised", "rival_load = 'none'",
        "promised = False",
    ),
    "END_RACE": (
        "require promised -- what is given back was promised",
        "load = rival_load if load == 'none' else load", "rival_load = 'none'", "promised = False",
    ),
}  # fmt: skip
"""Effects of two loads."""


def _part(table: Table) -> Part:
    first = f"{UNTRIED_A} and not ({UNTRIED_B} and b_first)"
    return Part(
        table,
        guards={
            "another_room": f"{UNTRIED_A} or {UNTRIED_B}",
            "unreferenced": "not in_a and not in_b",
        },
        actions={
            "next_room": (
                f"room = 'a' if {first} else 'b'",
                "tried_a = tried_a or room == 'a'",
                "tried_b = tried_b or room == 'b'",
            ),
            "keep_rows": ("has_rows = True",),
            "keep_first": ("has_rows = True",),
            "drop_rows": ("has_rows = False",),
        },
        effects={
            "OPEN_TRANSFER": (
                "require load == 'none' -- one load at a time (F37)",
                "require in_a and room == 'a' or in_b and room == 'b' -- it loads for who waits",
                "load = 'asked'",
            ),
            **RACE,
            "ARM_LATE": ("late = True",),
            "CANCEL_TRANSFER": ("load = 'none' if load == 'asked' else load",),
            "ASK_ROOM": (
                "require load == 'none' -- nobody is asked for another room while one loads",
            ),
            "ARM_RETRY": ("again = True",),
            "ARM_NO_ROOM": ("asked = True",),
            "KEEP_ROWS": ("require not kept -- rows are kept once", "kept = True"),
            "NOTIFY_READY": ("ready_a = in_a", "ready_b = in_b"),
            "NOTIFY_ONE": ("ready_a = in_a", "ready_b = in_b"),
            "NOTIFY_FAILED": NO_WAITERS,  # their requests fail, and let go at once
            "RELEASE_ROWS": (
                "require kept -- what is released was kept",
                "require not in_a and not in_b -- rows that somebody reads stay (F23)",
                "kept = False",
                "slots = False",
            ),
        },
        silent=frozenset(
            ("keep_failure", "note_slots", "CANCEL_ROOM", "CANCEL_FOLLOWERS", "ASK_RIVAL")
        ),
        at_end=(
            "require not slots -- slots are given back or are another's (F21)",
            "require load != 'asked' -- no lease is left in the line",
            "load = 'none'",
            "lost = False",
            "require not promised -- slots are promised to two that race",
            "room = 'none'",
            "rival = 'none'",
            *NO_WAITERS,
        ),
        timers={"asked": m.NoRoomCame, "again": m.RetryDue, "late": m.LoadLate},
    )


def _rooms() -> Iterator[Happening]:
    for room, other in ROOMS:
        joins = (*(("b_first = in_b",) if room == "a" else ()), f"in_{room} = True")
        races = f"state == HEDGED and rival == '{room}'"
        for is_rival in (False, True):
            yield Happening(
                f"{room}_may_be_first" if is_rival else f"{room}_is_wanted",
                "fault" if is_rival else "work",
                f"not in_{room} and room != '{room}' and not ({races}) and state not in {ENDED}",
                m.RivalWanted if is_rival else m.Wanted,
                before=(f"wants_{room} = True",),
                event_fields={"room": f"'{room}'"},
                actions={
                    "add_waiter": joins,
                    "begin": (*joins, f"room = '{room}'", f"tried_{room} = True"),
                    "begin_rival": (*joins, f"rival = '{room}'", f"tried_{room} = True"),
                },
            )
        leaves = (f"in_{room} = False", f"tried_{room} = False", "b_first = False")
        yield Happening(
            f"{room}_leaves", "fault", f"in_{room}", m.Unwanted,
            before=(f"wants_{room} = False", f"ready_{room} = False"),
            guards={"others_wait": f"in_{other}"}, event_fields={"room": f"'{room}'"},
            actions={"remove_waiter": leaves},
        )  # fmt: skip


def _load() -> Iterator[Happening]:
    open_, under_way, over = "load == 'open'", "load != 'none'", "load = 'none'"
    loads: tuple[tuple[str, str, str, type[Event], tuple[str, ...]], ...] = (
        ("slots_are_leased", "work", "load == 'asked'", m.LeaseGranted, ("load = 'open'",)),
        ("rows_arrive", "work", open_, m.Loaded, (over, "slots = True")),
        ("load_fails", "fault", under_way, m.LoadFailed, (over,)),
        ("load_is_lost", "fault", under_way, m.LoadLost, (over, "lost = True")),
        ("encoder_is_lost", "fault", under_way, m.EncoderLost, (over, "lost = True")),
        ("rows_are_late", "time", "late", m.LoadLate, ("late = False",)),
        ("asks_again", "retry", "again", m.RetryDue, ("again = False",)),
        ("no_room_comes", "time", "asked", m.NoRoomCame, ("asked = False",)),
        ("load_takes_too_long", "time", under_way, m.LoadTimedOut, (over,)),
        ("slots_come_back", "fault", "lost", m.SlotsReturned, ("lost = False",)),
    )
    takes_over = {"keep_other": ("room = rival",)}
    waits = {"other_waits": "rival_load == 'asked'"}
    for name, kind, when, event, before in loads:
        yield Happening(name, kind, when, event, 0, before, guards=waits, actions=takes_over)
    yield from _rival()
    open_ = f"state not in {ENDED}"
    yield Happening(
        "slots_are_needed", "fault", f"{open_} and state != ABSENT", m.EvictionRequested
    )
    yield Happening("is_idle_for_long", "time", open_, m.IdleTimePassed)


def _rival() -> Iterator[Happening]:
    open_, under_way = "rival_load == 'open'", "rival_load != 'none'"
    field, no = {"room": "rival"}, {"other_waits": "False"}
    yield Happening(
        "rival_gets_slots",
        "work",
        "rival_load == 'asked'",
        m.LeaseGranted,
        before=("rival_load = 'open'",),
    )
    swapped = ("room = 'b' if room == 'a' else 'a'", "rival = 'b' if rival == 'a' else 'a'")
    yield Happening(
        "rival_is_first", "work", open_, m.Loaded, before=("load = 'none'", "slots = True"),
        event_fields=field, actions={"keep_first": (*swapped, "has_rows = True")},
    )  # fmt: skip
    for name, kind, event in (
        ("rival_fails", "fault", m.LoadFailed),
        ("rival_is_lost", "fault", m.LoadLost),
        ("rivals_encoder_is_lost", "fault", m.EncoderLost),
        ("rival_takes_too_long", "time", m.LoadTimedOut),
    ):
        yield Happening(
            name, kind, under_way, event, event_fields=field, guards=no, actions={"keep_other": ()}
        )


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "WhoWaitsIsTold", 7,
            "whoever waits hears that the rows are here when they are, and not before",
            "ready_a == (in_a and state == RESIDENT) and ready_b == (in_b and state == RESIDENT)",
        ),
        Law(
            "BooksAreTrue", 4,
            "rows are in the books as long as the machine owns their slots (F21)",
            "kept == (state == RESIDENT) and kept == slots",
        ),
        Law(
            "ALoadIsUnderWay", 7, "who waits for rows waits for a load (F22)",
            "state not in (REQUESTED, LOADING, ABANDONED) or load != 'none'",
        ),
        Law(
            "WhoWantsThemIsKnown", 7,
            "whoever wants the rows waits for them, also for those of an abandoned load (F22)",
            "wants_a == in_a and wants_b == in_b",
        ),
        Law(
            "WhoLoadsOwnsThem", 3, "rows are loaded into leased slots",
            "state not in (LOADING, HEDGED, ABANDONED) or load == 'open'",
        ),
        Law(
            "ARoomIsAskedForAgain", 7, "a room that does not come is asked for again",
            "state != AWAITING_ROOM or again",
        ),
        Law(
            "TwoRace", 4,
            "a second load, and slots that are promised for it, are there while two race",
            "promised == (state == HEDGED) and (rival_load != 'none') == promised",
        ),
    )  # fmt: skip


def embedding_model(table: Table = m.TABLE) -> Model:
    """The model; `table` is EMBEDDING's, or one with a bug put back."""
    ended = f"state in {ENDED}"
    return Model(
        name="EMBEDDING",
        nodes=(345, 13),
        about="the rows of one hash at a prefill instance, whoever wants them",
        parts=(_part(table),),
        variables=(
            *(
                Variable(f"{what}_{room}", (False, True), note)
                for room in "ab"
                for what, note in (
                    ("wants", "its request does"),
                    ("in", "waits, as the machine has it"),
                    ("tried", "was loaded from"),
                    ("ready", "was told that the rows are here"),
                )
            ),
            Variable("b_first", (False, True), "b came before a"),
            Variable("room", ("none", "a", "b"), "of the load"),
            Variable("load", ("none", "asked", "open"), "slots are asked for, or leased"),
            Variable("rival", ("none", "a", "b"), "of the second load"),
            Variable("rival_load", ("none", "asked", "open"), "likewise"),
            Variable("promised", (False, True), "slots of the second load"),
            Variable("late", (False, True), "armed: it takes longer than is usual"),
            Variable("asked", (False, True), "armed: a room is awaited"),
            Variable("again", (False, True), "armed: it is asked for again"),
            Variable("lost", (False, True), "slots of a lost load are still fenced"),
            Variable("slots", (False, True), "the machine's own"),
            Variable("kept", (False, True), "in the books"),
            Variable("has_rows", (False, True)),
        ),
        happenings=(*_rooms(), *_load()),
        laws=_laws(),
        succeeds="ready_a and ready_b",
        promises=(
            Promise(
                "TimeMovesIt",
                7,
                "it ends, or holds rows, or loads from one room after another as new ones come",
                "again",
                ended,
                rests={
                    "state == RESIDENT": (
                        "rows that somebody reads stay; unread ones are evicted by time"
                    ),
                    "state == REQUESTED": (
                        "while new requests come with rooms of their own, one room is tried after "
                        "another; each request's own deadline bounds how long it waits"
                    ),
                    "state == HEDGED": (
                        "while rooms are added to loads that are late, one takes over from the "
                        "other; there are so many rooms of a request as encoders that are asked"
                    ),
                },
            ),
        ),
    )
