"""MEMBERSHIP as data: one life of an instance, and a gateway that speaks or not."""

from __future__ import annotations

from epd.fsm import membership as m
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

HEARS = "(MEMBER, REJOINING, DRAINING, DRAINING_REJOINING)"
SILENT = "CUT_OFF, FORSAKEN, DRAINING_CUT_OFF, DRAINING_FORSAKEN"
ASKS = f"(JOINING, AWAITING_NAME, REJOINING, DRAINING_REJOINING, {SILENT})"
DRAINS = "(DRAINING, DRAINING_REJOINING, DRAINING_CUT_OFF, DRAINING_FORSAKEN)"
WORKS = "(MEMBER, REJOINING, CUT_OFF)"
OVER = "(REJECTED, EXPELLED, LEFT)"


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "WhoTakesWorkKnowsTheTime", 4,
            "no work is taken whose deadline cannot be read, and its gateway hears of who takes it",
            f"state not in {WORKS} or (knows_time and beats and serving)",
        ),
        Law(
            "WhoDrainsSaysSo", 4, "no work is sent to who drains, and it leaves in time",
            f"state not in {DRAINS} or (beats and leave)",
        ),
        Law(
            "AClockRuns", 7,
            "silence of who speaks is noticed, and who was asked in vain is asked again",
            f"(state not in {HEARS} or silence) and (state not in {ASKS} or join)",
        ),
        Law(
            "ItsEndIsTold", 7,
            "a life is over when its process or its gateway was told so, and only then",
            f"told == (state in {OVER})",
        ),
    )  # fmt: skip


def _part(table: Table) -> Part:
    return Part(
        table,
        effects={
            "ARM_JOIN": ("join = True",), "TAKE_TIME": ("knows_time = True",),
            "ARM_SILENCE": ("silence = True",), "BEAT": ("beats = True",),
            "TELL_SERVING": ("require not serving -- a process serves once", "serving = True"),
            "ARM_ABSENT": ("absent = True",), "ARM_DRAIN": ("drain = True", "leave = True"),
            "SEND_LEAVE": ("told = True",),
            "REJECT": ("require not serving -- who served fits", "told = True"),
            "EXPEL": ("told = True",),
        },
        silent=frozenset(
            (
                *("keep_interval", "keep_bound", "follow", "SEND_JOIN", "DOUBT"),
                *("NOTE_FORMER_LOST", "FORSAKE"),
                *("LET_GO", "FORGET_ABSENT", "LOOK_FOR_HOLDER", "TELL_WAITING"),
            ),
        ),
        at_end=("beats = False",),
        timers={
            "join": m.JoinDue, "silence": m.GatewayFellSilent, "absent": m.AbsenceSettled,
            "drain": m.DrainTimedOut, "leave": m.MoveTimedOut,
        },
    )  # fmt: skip


def _happenings() -> tuple[Happening, ...]:
    runs = "state != OUTSIDE"
    hears = f"{runs} and knows_time"  # before its welcome it follows nobody
    return (
        Happening("starts", "time", "state == OUTSIDE", m.JoinDue),
        Happening("join_is_due", "time", "join", m.JoinDue, before=("join = False",)),
        Happening("welcome_comes", "fault", runs, m.Welcomed),
        Happening("is_acknowledged", "fault", hears, m.Acknowledged),
        Happening("news_were_missed", "fault", hears, m.NewsMissed),
        Happening("is_forgotten", "fault", hears, m.Forgotten),
        Happening("lost_one_is_listed", "fault", hears, m.LostOneListed),
        Happening("gateway_is_replaced", "fault", hears, m.GatewayReplaced),
        Happening("registry_begins", "fault", hears, m.RegistryBegan),
        Happening(
            "absence_settles", "time", "absent", m.AbsenceSettled, before=("absent = False",)
        ),
        Happening("silence", "time", "silence", m.GatewayFellSilent, before=("silence = False",)),
        Happening("other_is_heard", "fault", runs, m.OtherHeard),
        Happening("is_refused", "fault", runs, m.Refused),
        Happening("is_declared_lost", "fault", runs, m.DeclaredLost),
        Happening("name_is_taken", "fault", runs, m.NameTaken),
        Happening("holder_is_gone", "fault", "state == AWAITING_NAME", m.HolderGone),
        Happening("drain_is_asked_for", "fault", runs, m.DrainRequested),
        Happening("drain_times_out", "time", "drain", m.DrainTimedOut, before=("drain = False",)),
        Happening(
            "moves_time_out",
            "time",
            "leave and not drain",
            m.MoveTimedOut,
            before=("leave = False",),
        ),
        Happening("leave_is_asked_for", "fault", runs, m.LeaveRequested),
    )


def membership_model(table: Table = m.TABLE) -> Model:
    """The model; `table` is MEMBERSHIP's, or one with a bug put back."""
    return Model(
        name="MEMBERSHIP", nodes=(32,),
        about="one life of an instance, as it sees its place in the registry",
        parts=(_part(table),),
        variables=(
            Variable("join", (False, True), "armed: it is asked again"),
            Variable("silence", (False, True), "armed"),
            Variable("absent", (False, True), "armed: who has not joined is gone then"),
            Variable("drain", (False, True), "armed"),
            Variable("leave", (False, True), "armed: behind the other"),
            Variable("beats", (False, True), "its heart"),
            Variable("knows_time", (False, True), "the gateway's"),
            Variable("serving", (False, True), "its process was told so"),
            Variable("told", (False, True), "that it is over"),
        ),
        happenings=_happenings(), laws=_laws(),
        promises=(
            Promise(
                "WhoDrainsLeaves", 7,
                "it is over, or asks a gateway that does not answer again and again", "again",
                f"state in {OVER}",
                rests={
                    "state == JOINING": "there may be no gateway yet: any order of starts works",
                    "state == CUT_OFF": "its own work goes on, and only a gateway can tell more",
                    "state == FORSAKEN": "as above, and another gateway speaks",
                },
            ),
        ),
    )  # fmt: skip
