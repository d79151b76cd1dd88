"""LINK as data: one doubt, made by a message that had to be repeated."""

from __future__ import annotations

from epd.fsm import link
from epd.fsm.kernel import Table
from epd_lab.formal.form import Happening, Law, Model, Part, Promise, Variable

SILENT = "(MUTE, UNREACHABLE)"
OVER = "(CARRIES, OVER)"


def _laws() -> tuple[Law, ...]:
    return (
        Law(
            "WhoIsMuteIsTold", 5,
            "the gateway places nothing on a pair that is mute, and may on one that is not",
            f"state == OVER or told_mute == (state in {SILENT})",
        ),
        Law(
            "NobodyWaitsInVain", 7, "what waited for a peer that cannot be reached was given up",
            "state != UNREACHABLE or given_up",
        ),
        Law(
            "ATimerIsArmed", 7, "while it is open, time goes on and the peer is asked again",
            f"state in {OVER} or (retry and timer)",
        ),
    )  # fmt: skip


def _happenings() -> tuple[Happening, ...]:
    return (
        Happening("doubted_again", "fault", event=link.Doubted),
        Happening("echo_arrives", "fault", "probe", link.EchoReceived),
        Happening("retry_is_due", "retry", "retry", link.RetryDue, before=("retry = False",)),
        Happening(
            "echo_is_missed", "time", "timer and not absent", link.EchoMissed,
            before=("timer = False",),
        ),
        Happening(
            "peer_is_forgotten", "time", "timer and absent", link.PeerForgotten,
            before=("timer = False",),
        ),
        Happening("registry_begins_anew", "fault", "not absent", before=("absent = True",)),
        Happening("peer_is_lost", "fault", event=link.PeerLost),
    )  # fmt: skip


def link_model(table: Table = link.TABLE) -> Model:
    """The model; `table` is LINK's, or one with a bug put back."""
    part = Part(
        table,
        effects={
            "SEND_PROBE": ("probe = True",),
            "OPEN_ANEW": ("given_up = False",),
            "TELL": (f"told_mute = state in {SILENT}",),
            "GIVE_UP": ("given_up = True",),
            "ARM_RETRY": ("retry = True",),
            "ARM_TIMEOUT": ("timer = True",),
        },
        at_end=("probe = False", "given_up = False"),
        timers={"retry": link.RetryDue, "timer": link.EchoMissed},
    )
    return Model(
        name="LINK",
        nodes=(12,),
        about="a doubt whether messages still arrive at a peer",
        parts=(part,),
        variables=(
            Variable("probe", (True, False), "sent: an echo may come, or never"),
            Variable("retry", (True, False), "armed"),
            Variable("timer", (True, False), "of the echo, armed"),
            Variable("absent", (False, True), "the registry began anew, and the peer did not join"),
            Variable("told_mute", (False, True), "what the gateway was told of the pair"),
            Variable("given_up", (False, True), "what waited for the peer, since the link is new"),
        ),
        happenings=_happenings(),
        laws=_laws(),
        promises=(
            Promise(
                "TimeEndsTheDoubt",
                7,
                "the doubt ends, or what waits for the peer is given up",
                "once",
                f"state in {OVER}",
                rests={
                    "state == UNREACHABLE": (
                        "only an echo or the peer's end can tell; nobody waits meanwhile"
                    )
                },
            ),
        ),
    )
