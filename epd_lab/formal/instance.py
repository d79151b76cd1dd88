"""INSTANCE as data: one life of a process, whose heart beats or not."""

from __future__ import annotations

from epd.fsm import instance as i
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

PRESENT = "(HEALTHY, SUSPECT, STUCK, PROBING, DRAINING, SWITCHING)"
OVER = "(LOST, LEFT)"


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "ItsEndIsToldOnce",
            4,
            "the attempts of a life that took work are failed once, when it is over",
            f"failed <= 1 and (failed == 1) == (member and state in {OVER})",
        ),
        Law(
            "OnlyMembersTakeWork",
            4,
            "no work is placed on a life that is no member, or over (F44)",
            "state != HEALTHY or (member and failed == 0)",
        ),
        Law(
            "DoubtEndsWithATest",
            4,
            "who was silent or stuck takes no work before it has passed a self-test (F87)",
            "state != HEALTHY or not doubted",
        ),
    )


# fmt: off
def _happenings() -> tuple[Happening, ...]:
    beats = f"member and state in {PRESENT}"
    return (
        Happening("joins", "fault", event=i.JoinAccepted),
        Happening("is_refused", "fault", "state == JOINING", i.JoinRejected),
        Happening(
            "beats", "fault", beats, i.HeartbeatReceived, before=("missed = False",),
            guards={"moves": "True"},
        ),
        Happening(
            "beats_and_is_stuck", "fault", beats, i.HeartbeatReceived,
            before=("missed = False", "doubted = True"), guards={"moves": "False"},
            event_fields={"num_over": "1"},
        ),
        Happening(
            "beat_is_missed", "time", "not missed", i.HeartbeatMissed,
            before=("missed = True", "doubted = member"),
        ),
        *(
            Happening(
                f"{name}_{which}", "fault", "state == PROBING", event,
                before=("doubted = False",) if (name, age) == ("passes", 0) else (),
                guards={"is_current": str(age == 0)}, event_fields={"age": str(age)},
            )
            for name, event in (("passes", i.ProbePassed), ("fails", i.ProbeFailed))
            for which, age in (("its_test", 0), ("an_earlier_test", 1))
        ),
        Happening("beats_have_ended", "time", "missed", i.HeartbeatsEnded),
        *(
            Happening(
                name + "_and_returns" * switches, "fault", beats, i.DrainAnnounced,
                guards={"is_overdue": str(is_over), "switches": str(switches)},
                event_fields={"returns": str(int(switches))},
            )
            for name, is_over in (("drains", False), ("drain_is_overdue", True))
            for switches in (False, True)
        ),
        Happening("leaves", "fault", beats, i.LeftReceived),
        Happening("is_replaced", "fault", event=i.EpochReplaced),
        Happening("is_given_up", "fault", event=i.GivenUp),
        Happening("name_is_contested", "fault", event=i.NameContested),
        Happening("name_is_held", "fault", "not member", event=i.NameHeld),
        *(
            Happening(
                name,
                "fault",
                "not member",
                i.HolderBeat,
                guards={"has_answered": str(answers)},
                event_fields={"version": "2" if answers else "0"},
            )
            for name, answers in (("holder_answers", True), ("holder_is_heard_late", False))
        ),
    )
# fmt: on


def instance_model(table: Table = i.TABLE) -> Model:
    """The model; `table` is INSTANCE's, or one with a bug put back.

    Silence is counted: one heartbeat that is due is missed, and then they have ended."""
    part = Part(
        table,
        effects={
            "WELCOME": ("member = True",),
            "FAIL_ATTEMPTS": (
                f"require state in {OVER} -- attempts are failed when it is over",
                "failed = failed + 1",
            ),
            "MOVE_ATTEMPTS": ("require failed == 0 -- only attempts that go on are moved",),
        },
        silent=frozenset(
            (
                *(
                    "keep_load",
                    "keep_bound",
                    "keep_roles",
                    "keep_return",
                    "keep_reason",
                    "keep_holder",
                    "keep_whose",
                ),
                *("note_seen", "keep_waits", "begin_probe", "clear_reason", "keep_failure"),
                *("SEND_SELF_TEST", "TELL_STUCK"),
                *("REFUSE", "PUBLISH", "DISCONNECT", "WATCH", "WATCH_ON", "WATCH_JOINS"),
                *("HOLD_OFF", "TELL_HELD", "SHOW_ALIVE"),
            )
        ),
    )
    return Model(
        name="INSTANCE",
        nodes=(28,),
        about="one life of an instance, as the registry sees it",
        parts=(part,),
        variables=(
            Variable("member", (False, True), "was welcomed: it took work"),
            Variable("missed", (False, True), "a heartbeat that was due"),
            Variable("doubted", (False, True), "silent or stuck, and no self-test passed since"),
            Variable("failed", (0, 1, 2), "times that its attempts were told of its end"),
        ),
        happenings=_happenings(),
        laws=_laws(),
        promises=(
            Promise(
                "SilenceEndsIt",
                7,
                "it is over, or its heart beats again and again",
                "again",
                f"state in {OVER}",
                rests={
                    "state in (STUCK, PROBING)": (
                        "it beats, and so ends itself where it gets on with nothing for long"
                    ),
                    "state in (DRAINING, SWITCHING)": (
                        "what is open is bounded by deadlines; the instance leaves by itself"
                    ),
                },
            ),
        ),
    )
