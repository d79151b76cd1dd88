"""INSTANCE: one life (epoch) of a serving process, as the gateway's registry sees it.

Theory of operation
-------------------
An instance joins again and again until welcomed, so any start order works (faults F17, F18).  While
its heartbeats arrive it is HEALTHY.  A missed one makes it SUSPECT: nothing new is placed there,
nothing is given up.  Silence beyond the bound makes it LOST, for good: its epoch is never trusted
again, its requests move elsewhere, and its peers are told so that they fence it.  LOST is not dead:
a stalled process may wake up and write, which is why memory is freed by fencing and not by this
machine (fault F7).  A process that returns joins with a new epoch, which is a new machine (F44).
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    Timers,
)
from epd.records import InstanceInfo, Load


class Do(Effect):
    WELCOME = "answer the join"
    REFUSE = "answer the join with the reason"
    PUBLISH = "send the registry to every instance"
    FAIL_ATTEMPTS = "tell every generation that used it"
    WATCH = "restart the clock of silence, with both its marks"
    WATCH_ON = "restart it from its first mark"
    DISCONNECT = "forget the connection"


class Own(Owned):
    ATTEMPTS = "attempts that use it", Do.FAIL_ATTEMPTS
    PLACE = "a place among the members, which all know", Do.PUBLISH
    CONNECTION = "a connection, which a refusal still needs", Do.DISCONNECT, Do.REFUSE


_MEMBER = (Own.ATTEMPTS, Own.PLACE, Own.CONNECTION)


class S(State):
    JOINING = "known by name; not checked yet", Own.CONNECTION
    HEALTHY = "takes work", *_MEMBER
    SUSPECT = "silent; keeps its work, gets no new", *_MEMBER
    DRAINING = "finishes its work, gets no new", *_MEMBER
    LOST = "this epoch is over; its memory is fenced by its peers"
    LEFT = "said good-bye with nothing open"


@dataclass(slots=True)
class JoinAccepted(Event):
    pass


@dataclass(slots=True)
class JoinRejected(Event):
    reason: str


@dataclass(slots=True)
class HeartbeatReceived(Event):
    load: Load


@dataclass(slots=True)
class HeartbeatMissed(Event):
    by_time = True


@dataclass(slots=True)
class HeartbeatsEnded(Event):
    """Silent beyond the bound."""

    by_time = True


@dataclass(slots=True)
class DrainAnnounced(Event):
    pass


@dataclass(slots=True)
class LeftReceived(Event):
    pass


@dataclass(slots=True)
class EpochReplaced(Event):
    """The same name joined with a new epoch, or a peer has heard from an earlier registry that this
    one is over: the process is gone, or may be fenced."""


def keep_load(instance: Instance, event: HeartbeatReceived) -> None:
    instance.load = event.load


def keep_reason(instance: Instance, event: JoinRejected) -> None:
    instance.reason = event.reason


_ENDED = (S.LOST, S.LEFT)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.JOINING, JoinAccepted, S.HEALTHY, (Do.WELCOME, Do.PUBLISH, Do.WATCH)),
    Row(S.JOINING, JoinRejected, S.LEFT, (Do.REFUSE,), keep_reason, note="version, model or layout differ"),
    Row((S.JOINING, S.HEALTHY, S.SUSPECT, S.DRAINING), HeartbeatsEnded, S.LOST),
    Row((S.HEALTHY, S.SUSPECT, S.DRAINING), JoinAccepted, None, (Do.WELCOME,), note="its welcome was lost"),
    Row((S.HEALTHY, S.DRAINING), HeartbeatReceived, None, (Do.WATCH,), keep_load),
    Row(S.HEALTHY, HeartbeatMissed, S.SUSPECT, (Do.WATCH_ON,)),
    Row(S.DRAINING, HeartbeatMissed, None, (Do.WATCH_ON,)),
    Row(S.SUSPECT, HeartbeatReceived, S.HEALTHY, (Do.WATCH,), keep_load),
    Row((S.HEALTHY, S.SUSPECT), DrainAnnounced, S.DRAINING, (Do.PUBLISH,)),
    Row((S.HEALTHY, S.SUSPECT, S.DRAINING), EpochReplaced, S.LOST, note="restarted (F44)"),
    Row((S.HEALTHY, S.SUSPECT, S.DRAINING), LeftReceived, S.LEFT),
)

IGNORES = (
    Ignore((S.JOINING,), (HeartbeatReceived, DrainAnnounced, LeftReceived, EpochReplaced), "not a member yet"),
    Ignore((S.DRAINING,), (DrainAnnounced,), "said before"),
    Ignore(_ENDED, (JoinAccepted, HeartbeatReceived, DrainAnnounced, LeftReceived, EpochReplaced), "this epoch is over; the process must join with a new one"),
)

_TIMERS: Timers = {HeartbeatMissed: (Do.WATCH,), HeartbeatsEnded: (Do.WATCH, Do.WATCH_ON)}
TABLE = Table("INSTANCE", __doc__ or "", S, S.JOINING, _ENDED, ROWS, IGNORES, timers=_TIMERS)
# fmt: on


class Instance(Machine):
    """One epoch of an instance: `key` is `id:epoch`."""

    table = TABLE
    __slots__ = ("acked_s", "info", "load", "reason", "seen_s")

    def __init__(
        self, info: InstanceInfo, load: Load, now_s: float, journal: Journal = NULL_JOURNAL
    ) -> None:
        super().__init__(f"{info.address.instance_id}:{info.address.epoch}", journal)
        self.info = info
        self.load = load
        self.seen_s = now_s
        self.acked_s = now_s  # when it was last told that it is known
        self.reason = ""

    @property
    def takes_work(self) -> bool:
        return self.state is S.HEALTHY

    @property
    def is_heard(self) -> bool:
        return self.state in (S.HEALTHY, S.DRAINING)

    @property
    def was_lost(self) -> bool:
        """Gone without a message."""
        return self.state is S.LOST

    @property
    def present(self) -> bool:
        """A member: peers may talk to it."""
        return self.state in (S.HEALTHY, S.SUSPECT, S.DRAINING)
