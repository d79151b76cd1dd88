"""CHILD as data: a process that is made, serves, ends or is stopped, over all its lives."""

from __future__ import annotations

from epd.fsm import child as c
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

LIVES = "(STARTING, RESTARTING, SERVING, SILENT, CUT_OFF)"
LEAVES = "(STOPPING, KILLING, REPLACING)"
SERVED = "(SERVING, SILENT, CUT_OFF, REPLACING, STOPPING, KILLING)"
OVER = "(STOPPED, FAILED)"


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "NoProcessIsLeft", 4, "who is over has no process, and who lives or is stopped has one",
            f"(process == 'none') == (state not in {LIVES} and state not in {LEAVES})",
        ),
        Law(
            "WhoIsStoppedIsTold", 7, "a process that is to end knows it, or is not made yet",
            f"state not in {LEAVES} or told or process == 'making'",
        ),
        Law(
            "AClockRuns", 7, "a pause ends, so does the time to drain, and who lives is asked",
            f"(state != PAUSED and state not in {LIVES} and state not in {LEAVES}) or clock",
        ),
    )  # fmt: skip


def _part(table: Table) -> Part:
    return Part(
        table,
        guards={
            "is_silent": "unanswered >= 1", "is_stuck": "unanswered >= 2",
            "is_hung": "unanswered >= 3", "may_follow": "not was_short",
        },
        actions={
            "count_ask": ("unanswered = unanswered + 1",), "hear": ("unanswered = 0",),
            "note_answer": ("unanswered = 0", "was_short = False"),
            "begin_life": ("unanswered = 0",), "begin_service": ("unanswered = 0",),
            "count_life": ("unanswered = 0", "was_short = True"),
        },
        effects={
            "LAUNCH": (
                "require process == 'none' -- one process of a child at a time",
                "process = 'making'", "told = False",
            ),
            "ASK": ("clock = True",),
            "TELL_HUNG": ("require unanswered > 0 -- who answers is left alone (F79)",),
            "ARM_PAUSE": ("clock = True",), "ARM_KILL": ("clock = True",),
            "ARM_GONE": ("clock = True",), "SEND_TERM": ("told = process == 'made'",),
            "SEND_KILL": ("told = process == 'made'",),
            "TELL_FAILED": ("require not has_served -- who served once is started again",),
            "TELL_SERVED": ("has_served = True",),
        },
        silent=frozenset(("count_pause", "rest", "SEND_INT", "TELL_SILENT", "TELL_STOPPED")),
        at_end=("clock = False",),
    )  # fmt: skip


def child_model(table: Table = c.TABLE) -> Model:
    """The model; `table` is CHILD's, or one with a bug put back.

    Its patience is one question less than the next one's, and one short life."""
    made = "process == 'made'"
    gone = ("process = 'none'", "told = False")
    rings = ("clock = False",)
    pauses, leaves = "state == PAUSED and clock", f"state in {LEAVES} and clock"
    lives = f"state in {LIVES} and clock"
    return Model(
        name="CHILD", nodes=(130,), about="one process that a supervisor keeps, over all its lives",
        parts=(_part(table),),
        variables=(
            Variable("process", ("none", "making", "made"), "of the operating system"),
            Variable("told", (False, True), "it was asked to end, or killed"),
            Variable("clock", (False, True), "armed"),
            Variable("has_served", (False, True), "in any of its lives"),
            Variable("unanswered", (0, 1, 2, 3), "questions"),
            Variable("was_short", (False, True), "its last life, which was followed at once"),
        ),
        happenings=(
            Happening("starts", "time", "state == PENDING", c.StartDue),
            Happening("pause_is_over", "time", pauses, c.StartDue, before=rings),
            Happening(
                "is_made", "work", "process == 'making'", c.Launched, before=("process = 'made'",),
            ),
            Happening(
                "cannot_be_made", "fault", "process == 'making'", c.LaunchFailed, before=gone,
            ),
            Happening("serves", "fault", made, c.Served),
            Happening("answers", "fault", made, c.Answered),
            Happening("waits", "fault", made, c.Waits),
            Happening("is_asked", "time", lives, c.AskDue, before=rings),
            Happening("is_declared_lost", "fault", made, c.DeclaredLost),
            Happening("ends", "fault", made, c.Ended, before=gone),
            Happening(
                "was_drained", "fault", f"{made} and has_served and state in {SERVED}", c.Drained,
                before=gone,
            ),
            Happening("has_to_end", "work", f"{made} and told", c.Ended, before=gone),
            Happening("is_asked_to_stop", "fault", event=c.StopRequested),
            Happening("is_hurried", "fault", event=c.HurryRequested),
            Happening("is_due", "time", leaves, c.KillDue, before=rings),
        ),
        laws=_laws(),
        promises=(
            Promise(
                "WhoIsStoppedEnds", 7, "it is over, or it lives", "again", f"state in {OVER}",
                fair=("time", "work"),
                rests={f"state in {LIVES}": "it serves until it ends or is asked to"},
            ),
        ),
    )  # fmt: skip
