"""ADAPTER as data: one adapter that a client loads and unloads, and the instances that follow."""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import adapter as a
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

LISTED = "(LOADING, SERVING, RETIRING)"
AT_WORK = "(LOADING, RETIRING, REMOVING)"


def _part(table: Table) -> Part:
    return Part(
        table,
        effects={
            "SEND_LIST": (f"listed = state in {LISTED}", "applied = False"),
            "OFFER": ("offered = True", "served = True"),
            "WITHDRAW": ("offered = False",),
            "ANSWER": ("waiting = False",),
            "FREE_NAME": ("require not freed -- a name is freed once", "freed = True"),
            "ARM_LOADING": ("timer = True",),
            "ARM_RETIRING": ("timer = True",),
            "ARM_REMOVING": (
                "require late or not requests -- open requests have their time",
                "timer = True",
            ),
        },
        silent=frozenset(
            ("SEND_AGAIN", "COUNT_REQUESTS", "keep_asker", "keep_reason", "note_late")
        ),
        timers={"timer": a.TimedOut},
    )


def _happenings() -> Iterator[Happening]:
    asked = ("waiting = True",)
    yield Happening("is_loaded", "work", "state == NAMED", a.LoadAsked, before=asked)
    held = ("listed = True", "held = True")
    yield Happening("is_of_the_start", "fault", "state == NAMED", a.HeldFromStart, before=held)
    yield Happening("is_unloaded", "fault", "offered", a.UnloadAsked, before=asked)
    applies = ("applied = True", "held = listed")
    behind, alone = "not applied and state != NAMED", {"is_held": "False"}
    yield Happening(
        "all_apply_the_list", "fault", behind, a.ListApplied, before=applies,
        guards={"is_held": "True"}, event_fields={"num_instances": "1"},
    )  # fmt: skip
    nobody = {"num_instances": "0"}
    yield Happening(
        "nobody_is_there", "fault", behind, a.ListApplied, guards=alone, event_fields=nobody
    )
    one_cannot, late = f"{behind} and listed", "state != NAMED"
    yield Happening(
        "one_cannot_hold_it", "fault", one_cannot, a.LoadRefused, before=("applied = True",)
    )
    yield Happening("one_is_behind", "retry", late, a.InstanceBehind)
    yield Happening("request_comes", "fault", "offered", before=("requests = True",))
    ends = ("requests = False",)
    yield Happening("request_ends", "fault", "requests", a.RequestEnded, before=ends)
    over = ("timer = False", "late = True")
    none_left = "state == RETIRING and not requests"
    yield Happening("none_is_left", "fault", none_left, a.LastRequestEnded)
    yield Happening("time_is_over", "time", "timer", a.TimedOut, before=over)


def adapter_model(table: Table = a.TABLE) -> Model:
    """The model; `table` is ADAPTER's, or one with a bug put back."""
    return Model(
        name="ADAPTER", nodes=(25,),
        about="an adapter that comes and goes, and the instances that are to hold it",
        parts=(_part(table),),
        variables=(
            Variable("waiting", (False, True), "a client, for the answer"),
            Variable("listed", (False, True), "instances are to hold it"),
            Variable("applied", (False, True), "by all of them, the list"),
            Variable("held", (False, True), "by every instance"),
            Variable("offered", (False, True), "as a model"),
            Variable("served", (False, True), "it was a model"),
            Variable("requests", (False, True), "that name it are open"),
            Variable("late", (False, True), "time has ended a wait"),
            Variable("freed", (False, True), "its name"),
            Variable("timer", (False, True), "armed"),
        ),
        happenings=tuple(_happenings()),
        laws=(
            Law("OfferedIsHeld", 3, "a model is held by every instance", "not offered or held"),
            Law(
                "ListedIsKept", 4, "what may run is listed, and nothing else is",
                f"listed == (state in {LISTED})",
            ),
            Law(
                "WhoAskedWaits", 1, "who asked has one answer, at the end of the work",
                f"waiting == (state in {AT_WORK})",
            ),
            Law("NamesComeBack", 4, "a name is free when all is over", "freed == (state == GONE)"),
            Law(
                "AFailedLoadHadNoRequest", 3, "requests name a model, never a load",
                "not requests or served",
            ),
            Law("WorkIsBounded", 7, "who waits has a clock", f"state not in {AT_WORK} or timer"),
        ),
        promises=(
            Promise(
                "WorkEnds", 7, "a load and an unload end", "again", f"state not in {AT_WORK}",
                rests={"state == NAMED": "nobody asks"},
            ),
        ),
    )  # fmt: skip
