"""ENCODING as data: one hash at an encode instance, and two rooms that come, go, and come again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.fsm import encoding as e
from epd.fsm.kernel import Event, Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

ENDED = "(FAILED, EVICTED)"
IS_OVER = f"state in {ENDED}"
CACHE = "rows that rooms read stay; unread ones are evicted by time"
ROOMS = (("a", "b"), ("b", "a"))


@dataclass(frozen=True, slots=True)
class EncodingSetting:
    """What the instance has; the names are constants of the model."""

    stored: bool = False
    encodes: bool = True


ENCODINGS = {  # with `nodes`
    "ENCODING": (EncodingSetting(), (33, 16)),
    "ENCODING_STORED": (EncodingSetting(stored=True), (64, 10)),
    "ENCODING_WITHOUT_TOWER": (EncodingSetting(stored=True, encodes=False), (26, 10)),
}
UNREAD = "not in_a and not in_b"
SILENT = frozenset(
    "keep_patches note_absent note_bad_image note_timeout STORE_ROWS REPORT_HANG "
    "ARM_OUTCOME".split()
)


KEEPS = "require has_rows -- rows are kept that are there"
FILLS = "require kept != 'nowhere' -- rooms are filled from rows in the books (F21)"
EFFECTS = {
    "AWAIT_TURN": ("require turn == 'no' -- it waits for one turn", "turn = 'waits'"),
    "FREE_PIXELS": ("require pixels -- pixels are given back once", "pixels = False"),
    "COUNT_AHEAD": ("turn = 'counts'",), "LEAVE_AHEAD": ("turn = 'no'",),
    "START_LOAD": (
        "require not reading -- storage is asked once (F37)",
        "require turn == 'counts' -- work begins in its turn (F4)", "reading = True",
    ),
    "START_PREPROCESS": (
        "require work == 'none' -- single flight (F37)",
        "require turn == 'counts' -- work begins in its turn (F4)", "work = 'pool'",
    ),
    "ENQUEUE": ("work = 'prepared'",),
    "DEQUEUE": (
        "require work == 'prepared' -- what a batch owns is not taken back", "work = 'none'",
    ),
    "KEEP_ROWS": (KEEPS, "kept = 'device'"), "KEEP_HOST_ROWS": (KEEPS, "kept = 'host'"),
    "START_DEMOTION": (
        f"require kept == 'device' and {UNREAD} -- unread rows are moved (F31)", "kept = 'host'",
        "copying = 'down'",
    ),
    "START_PROMOTION": (
        f"require kept == 'host' and {UNREAD} -- unread rows are moved (F31)", "kept = 'device'",
        "copying = 'up'",
    ),
    "FILL_ROOMS": (FILLS,), "FILL_ONE": (FILLS,),
    "FAIL_ROOMS": tuple(f"{what}_{room} = False" for what in ("asks", "in") for room in "ab"),
    "RELEASE_ROWS": (
        "require kept != 'nowhere' -- what is dropped was kept",
        f"require {UNREAD} -- unread rows are dropped (F31)", "kept = 'nowhere'",
    ),
}  # fmt: skip


def _part(table: Table) -> Part:
    return Part(
        table,
        guards={
            "in_batch": "in_batch",
            "may_be_stored": "STORED",
            "is_made": "(in_a or in_b) and ENCODES",
            "unreferenced": UNREAD,
        },
        actions={
            "enter_batch": ("in_batch = True",),
            "keep_rows": ("has_rows = True", "in_batch = False"),
            "drop_rows": ("has_rows = False",),
            "keep_loaded": ("has_rows = True",),
            "keep_copy": ("has_rows = True",),
            "note_failure": ("in_batch = False",),
        },
        effects=EFFECTS,
        silent=SILENT,
        at_end=(
            "require work != 'prepared' -- no patches are left in the queue for batches",
            "require turn == 'no' -- nothing of the run-ahead is left",
            "require not pixels -- nor of the memory for pixels",
            # late outcomes find nobody
            "work = 'none'",
            "reading = False",
            "copying = 'no'",
            "in_batch = False",
            "in_a = False",
            "in_b = False",
        ),
    )


def _rooms() -> Iterator[Happening]:
    for room, other in ROOMS:
        mine = f"in_{room}"
        yield Happening(
            f"{room}_is_asked_for", "work", f"not {mine} and state not in {ENDED}", e.Requested,
            before=(f"asks_{room} = True",), event_fields={"room": f"'{room}'"},
            actions={"add_room": (f"{mine} = True",)},
        )  # fmt: skip
        yield Happening(
            f"{room}_closes", "fault", mine, e.RoomClosed, before=(f"asks_{room} = False",),
            guards={"others_wait": f"in_{other}"}, event_fields={"room": f"'{room}'"},
            actions={"remove_room": (f"{mine} = False",), "drop_patches": (f"{mine} = False",)},
        )  # fmt: skip


def _workers() -> Iterator[Happening]:
    works: tuple[tuple[str, str, type[Event], str, str], ...] = (
        ("pool_is_done", "work", e.PreprocessSucceeded, "pool", "none"),
        ("image_is_bad", "fault", e.PreprocessFailed, "pool", "none"),
        ("pool_fails", "fault", e.PreprocessCrashed, "pool", "none"),
        ("batch_begins", "work", e.BatchStarted, "prepared", "batch"),
        ("batch_is_done", "work", e.EncodeSucceeded, "batch", "none"),
        ("batch_fails", "fault", e.EncodeFailed, "batch", "none"),
    )
    for name, kind, event, doing, after in works:
        yield Happening(name, kind, f"work == '{doing}'", event, 0, (f"work = '{after}'",))
    came = ("turn = 'counts'", "pixels = True")
    yield Happening("its_turn_comes", "work", "turn == 'waits'", e.TurnCame, 0, came)
    begun = f"state != ABSENT and state not in {ENDED}"
    yield Happening("work_takes_too_long", "time", begun, e.EncodeTimedOut)


def _tiers() -> Iterator[Happening]:
    read = ("reading = False",)
    yield Happening("storage_answers", "work", "reading", e.LoadSucceeded, 0, read)
    yield Happening("storage_has_none", "fault", "reading", e.LoadMissed, 0, read)
    yield Happening("storage_is_slow", "time", "reading and state == LOADING", e.LoadTimedOut)
    over, copies = ("copying = 'no'",), "copying != 'no'"
    down, up = "copying == 'down'", "copying == 'up'"
    yield Happening("copy_is_down", "work", down, e.DemotionSucceeded, 0, over)
    yield Happening("copy_is_up", "work", up, e.PromotionSucceeded, 0, over)
    yield Happening("copy_fails", "fault", copies, e.CopyFailed, 0, over)
    yield Happening("copy_is_slow", "time", copies, e.CopyTimedOut, 0, over)
    full = "kept == 'device' and copying == 'no'"
    yield Happening("device_is_full", "fault", full, e.DemotionRequested)
    open_ = f"state not in {ENDED}"
    yield Happening(
        "memory_is_needed", "fault", f"{open_} and state != ABSENT", e.EvictionRequested
    )
    yield Happening("is_idle_for_long", "time", open_, e.IdleTimePassed)


def _rests(told: EncodingSetting) -> dict[str, str]:
    """Where an ENCODING may stay, or come back to, for ever."""
    rests = {"state == RESIDENT": CACHE, "state == DEMOTED": CACHE}
    if told.encodes:
        rests["state == ABANDONED"] = (
            "work hangs, and each time that its rooms have failed by time new ones come; "
            "without new ones it fails by time, too"
        )
    return rests


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "WhoAsksIsKnown", 7,
            "whoever asks has an open room, also at an abandoned encoding (F22)",
            "asks_a == in_a and asks_b == in_b",
        ),
        Law(
            "BooksAreTrue", 4, "rows are in the books of one tier as long as they are there (F21)",
            "has_rows == (kept != 'nowhere')",
        ),
        Law(
            "WhatIsWaitedForCounts", 4,
            "rows count as run ahead while rooms wait for them, and no longer (F4)",
            "not has_rows or (turn == 'counts') == (in_a or in_b)",
        ),
        Law("ItEndsEmpty", 4, "what ended keeps no rows", f"not ({IS_OVER}) or not has_rows"),
        Law(
            "OneBatchHasIt", 5,
            "its patches are in a batch, or it is not there: single flight (F37)",
            "state != ENCODING or work == 'batch'",
        ),
        Law(
            "ReadersKeepRows", 3,
            "rooms that read keep rows where they are, until the copy is whole (F31)",
            "state not in (RESIDENT, DEMOTED, DEMOTING, PROMOTING) or has_rows",
        ),
    )  # fmt: skip


def encoding_model(name: str, table: Table = e.TABLE) -> Model:
    """The model; `table` is ENCODING's, or one with a bug put back."""
    told, nodes = ENCODINGS[name]
    return Model(
        name=name, nodes=nodes, about="the making of one hash's rows at an encode instance",
        parts=(_part(table),),
        variables=(
            *(Variable(f"asks_{room}", (False, True), "its consumer does") for room in "ab"),
            *(Variable(f"in_{room}", (False, True), "the room is open") for room in "ab"),
            Variable("in_batch", (False, True), "as the machine notes it"),
            Variable("has_rows", (False, True)),
            Variable("turn", ("no", "waits", "counts"), "as the run-ahead counts it"),
            Variable("pixels", (False, True), "memory for them is counted"),
            Variable("work", ("none", "pool", "prepared", "batch"), "under way"),
            Variable("reading", (False, True), "from storage"),
            Variable("copying", ("no", "down", "up"), "between tiers"),
            Variable("kept", ("nowhere", "device", "host"), "the books that count the rows"),
        ),
        happenings=(*_rooms(), *_workers(), *_tiers()), laws=_laws(),
        promises=(
            Promise(
                "TimeMovesIt", 7,
                "it ends, rests as cache, or is asked for again and again while work hangs",
                "again", IS_OVER, rests=_rests(told),
            ),
        ),
        succeeds="state in (RESIDENT, DEMOTED) and in_a and in_b",
        constants={field.upper(): getattr(told, field) for field in told.__slots__},
    )  # fmt: skip
