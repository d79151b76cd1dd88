"""INSTANCE: one life (epoch) of a serving process, as the gateway's registry sees it.

Theory of operation
-------------------
An instance joins again and again until welcomed, so any start order works (faults F17, F18).  While
its heartbeats arrive it is HEALTHY.  A missed one makes it SUSPECT: nothing new is placed there,
nothing is given up.  Silence beyond the bound makes it LOST, for good: its epoch is never trusted
again, its requests move elsewhere, and the registry has its peers fence it.  LOST is not dead: a
stalled process may wake up and write, which is why memory is freed by fencing and not by this
machine (fault F7).  A process that returns joins with a new epoch, which is a new machine (F44).

A heart may beat though nothing else moves (F87).  Each heartbeat lists what the instance waits for,
how long, and the bound of that.  Beyond a bound it is STUCK: it keeps its work and gets no new.
Neither a heart that beats again nor a wait that ends shows that its device works.  So whoever was
silent or stuck is PROBING first, until it has passed a self-test.

A draining one finishes its work and leaves.  One that is SWITCHING does so too, and its process
returns as another epoch, with other roles.

A name has one instance (F78).  A life of the same lineage, by a later epoch, is the next life of
this one, whose process its parent has seen end: it replaces it at once.  Anybody else who joins
under the name of a member is a stranger.  It waits (AWAITING_NAME) while the member may be dead,
and is taken in when the member is LOST or has LEFT.  It is refused when the member has answered, by
a heartbeat with a registry that was published after the stranger had asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

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
    unless,
)
from epd.records import InstanceInfo, Load


class Do(Effect):
    WELCOME = "answer the join"
    REFUSE = "answer the join with the reason"
    PUBLISH = "send the registry to every instance"
    FAIL_ATTEMPTS = "tell every generation that used it"
    WATCH = "restart the clock of silence, with both its marks"
    WATCH_ON = "restart it from its first mark"
    WATCH_JOINS = "restart the clock of silence of who asks again and again"
    HOLD_OFF = "have who asks for its name wait"
    TELL_HELD = "answer the join with who has the name"
    SHOW_ALIVE = "let those who ask for its name hear that it lives"
    MOVE_ATTEMPTS = "have attempts that use it go elsewhere, while it still works on them"
    DISCONNECT = "forget the connection"
    SEND_SELF_TEST = "ask it for a self-test, by number"
    TELL_STUCK = "say what it does not get on with"


class Own(Owned):
    ATTEMPTS = "attempts that use it", Do.FAIL_ATTEMPTS
    PLACE = "a place among the members, which all know", Do.PUBLISH
    CONNECTION = "a connection, which a refusal still needs", Do.DISCONNECT, Do.REFUSE


_MEMBER = (Own.ATTEMPTS, Own.PLACE, Own.CONNECTION)


class S(State):
    JOINING = "known by name; not checked yet", Own.CONNECTION
    AWAITING_NAME = "its name is another's, who may be alive", Own.CONNECTION
    HEALTHY = "takes work", *_MEMBER
    SUSPECT = "silent; keeps its work, gets no new", *_MEMBER
    STUCK = "beats, and makes no progress; keeps its work, gets no new", *_MEMBER
    PROBING = "beats again, or moves again; gets no new work before a self-test", *_MEMBER
    DRAINING = "finishes its work, gets no new", *_MEMBER
    SWITCHING = "finishes its work, gets no new; its next epoch has other roles", *_MEMBER
    LOST = "this epoch is over; its memory is fenced by its peers"
    LEFT = "said good-bye with nothing open"


@dataclass(slots=True)
class JoinAccepted(Event):
    at_s: float  # here and below: when it was heard, by the gateway's own clock


@dataclass(slots=True)
class JoinRejected(Event):
    reason: str


@dataclass(slots=True)
class NameContested(Event):
    """A process joins under its name that is not its next life."""

    info: InstanceInfo


@dataclass(slots=True)
class NameHeld(Event):
    """It joins under the name of a member; `version` is that of the last published registry."""

    version: int
    holder: InstanceInfo
    at_s: float


@dataclass(slots=True)
class HolderBeat(Event):
    """Whoever has its name has sent a heartbeat."""

    version: int  # of the registry that the holder has seen
    holder: InstanceInfo


@dataclass(slots=True)
class HeartbeatReceived(Event):
    load: Load
    version: int  # of the registry that it has seen
    at_s: float


@dataclass(slots=True)
class HeartbeatMissed(Event):
    by_time = True


@dataclass(slots=True)
class HeartbeatsEnded(Event):
    """Silent beyond the bound."""

    by_time = True
    reason: ClassVar[str] = "silent"


@dataclass(slots=True)
class ProbePassed(Event):
    """Its device has done the work of a self-test."""

    serial: int


@dataclass(slots=True)
class ProbeFailed(Event):
    serial: int
    reason: str


@dataclass(slots=True)
class DrainAnnounced(Event):
    left_s: float  # until its open work is to move elsewhere
    next_roles: tuple[str, ...] = ()  # that its process returns with; none: it leaves


@dataclass(slots=True)
class LeftReceived(Event):
    reason: ClassVar[str] = "it was asked to end"


@dataclass(slots=True)
class EpochReplaced(Event):
    """Its next life has joined: the process is gone."""

    reason: ClassVar[str] = "replaced by its next life"


@dataclass(slots=True)
class GivenUp(Event):
    """It was lost in an earlier registry, and a peer may have fenced it; or the kernel of its host
    has reported the end of its process to a neighbour."""

    reason: ClassVar[str] = "another has told of its end"


def keep_load(instance: Instance, event: HeartbeatReceived) -> None:
    instance.load, instance.seen_s = event.load, event.at_s


def moves(instance: Instance, event: HeartbeatReceived) -> bool:
    """Whether it waits for nothing beyond its bound."""
    return all(wait.for_s <= wait.bound_s for wait in event.load.waits)


def keep_waits(instance: Instance, event: HeartbeatReceived) -> None:
    keep_load(instance, event)
    over = [wait for wait in event.load.waits if wait.for_s > wait.bound_s]
    told = (f"{one.what} for {one.for_s:.1f} s (bound {one.bound_s:.1f} s)" for one in over)
    instance.reason = f"makes no progress: {', '.join(told)}"


def begin_probe(instance: Instance, event: HeartbeatReceived) -> None:
    keep_load(instance, event)
    instance.num_probes += 1
    instance.reason = "its self-test has not passed yet"


def is_current(instance: Instance, event: ProbePassed | ProbeFailed) -> bool:
    """Not of a self-test before it was stuck again."""
    return event.serial == instance.num_probes


def clear_reason(instance: Instance, event: ProbePassed) -> None:
    instance.reason = ""


def keep_failure(instance: Instance, event: ProbeFailed) -> None:
    instance.reason = f"its self-test failed: {event.reason}"


def note_seen(instance: Instance, event: JoinAccepted | NameHeld) -> None:
    instance.seen_s = event.at_s


def keep_bound(instance: Instance, event: DrainAnnounced) -> None:
    instance.drain_left_s = event.left_s


def keep_roles(instance: Instance, event: DrainAnnounced) -> None:
    keep_bound(instance, event)
    instance.next_roles = event.next_roles


def switches(instance: Instance, event: DrainAnnounced) -> bool:
    return bool(event.next_roles)


def keep_return(instance: Instance, event: LeftReceived) -> None:
    instance.reason = f"it is to return with the roles {', '.join(instance.next_roles)}"


def is_overdue(instance: Instance, event: DrainAnnounced) -> bool:
    return event.left_s <= 0.0


def keep_reason(
    instance: Instance,
    event: JoinRejected | HeartbeatsEnded | LeftReceived | EpochReplaced | GivenUp,
) -> None:
    instance.reason = event.reason


def keep_whose(instance: Instance, event: HolderBeat) -> None:
    instance.reason = (
        f"its name is in use by a living instance, {named(event.holder)}; give this one another "
        "with --id, or --id-prefix with --topology"
    )


def keep_holder(instance: Instance, event: NameHeld) -> None:
    note_seen(instance, event)
    instance.held_version = event.version
    instance.reason = f"waits for {named(event.holder)} to leave or to be lost"


def has_answered(instance: Instance, event: HolderBeat) -> bool:
    """It has seen a registry that was published when this one had asked: no late heartbeat has."""
    return event.version > instance.held_version


def named(info: InstanceInfo) -> str:
    """An instance as people find it."""
    return f"{info.address.instance_id} (pid {info.pid}, {info.address.endpoint})"


_SERVES = (S.HEALTHY, S.SUSPECT, S.STUCK, S.PROBING)
_DRAINING = (S.DRAINING, S.SWITCHING)
_MEMBERS = (*_SERVES, *_DRAINING)
_ENDED = (S.LOST, S.LEFT)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row((S.JOINING, S.AWAITING_NAME), JoinAccepted, S.HEALTHY, (Do.WELCOME, Do.PUBLISH, Do.WATCH), note_seen),
    Row((S.JOINING, S.AWAITING_NAME), JoinRejected, S.LEFT, (Do.REFUSE,), keep_reason, note="version, model or layout differ"),
    Row(S.JOINING, NameHeld, S.AWAITING_NAME, (Do.PUBLISH, Do.TELL_HELD, Do.WATCH_JOINS), keep_holder, note="a stranger (F78)"),
    Row(S.AWAITING_NAME, NameHeld, None, (Do.TELL_HELD, Do.WATCH_JOINS), note_seen, note="it asks again"),
    Row(S.AWAITING_NAME, HolderBeat, S.LEFT, (Do.REFUSE,), keep_whose, when=has_answered, note="the other lives (F78)"),
    Row(S.AWAITING_NAME, HolderBeat, None, when=unless(has_answered), note="it may be late"),
    Row((S.JOINING, S.AWAITING_NAME, *_MEMBERS), HeartbeatsEnded, S.LOST, (), keep_reason),
    Row(_MEMBERS, JoinAccepted, None, (Do.WELCOME,), note="its welcome was lost"),
    Row(_MEMBERS, NameContested, None, (Do.HOLD_OFF,), note="its silence or its answer decides (F78)"),
    Row(S.HEALTHY, HeartbeatReceived, None, (Do.WATCH, Do.SHOW_ALIVE), keep_load, moves),
    Row((S.SUSPECT, S.STUCK), HeartbeatReceived, S.PROBING, (Do.SEND_SELF_TEST, Do.WATCH, Do.SHOW_ALIVE), begin_probe, moves),
    Row(S.PROBING, HeartbeatReceived, None, (Do.SEND_SELF_TEST, Do.WATCH, Do.SHOW_ALIVE), keep_load, moves, "question or answer may be lost"),
    Row((S.HEALTHY, S.SUSPECT, S.PROBING), HeartbeatReceived, S.STUCK, (Do.TELL_STUCK, Do.WATCH, Do.SHOW_ALIVE), keep_waits, unless(moves), "out of placement (F87)"),
    Row(S.STUCK, HeartbeatReceived, None, (Do.WATCH, Do.SHOW_ALIVE), keep_waits, unless(moves), "it ends itself beyond a second bound"),
    Row(S.PROBING, ProbePassed, S.HEALTHY, (), clear_reason, is_current),
    Row(S.PROBING, ProbePassed, None, when=unless(is_current), note="of an earlier one"),
    Row(S.PROBING, ProbeFailed, S.STUCK, (Do.TELL_STUCK,), keep_failure, is_current),
    Row(S.PROBING, ProbeFailed, None, when=unless(is_current)),
    Row(_DRAINING, HeartbeatReceived, None, (Do.WATCH,), keep_load, note="its name will be free"),
    Row((S.HEALTHY, S.STUCK, S.PROBING), HeartbeatMissed, S.SUSPECT, (Do.WATCH_ON,)),
    Row(_DRAINING, HeartbeatMissed, None, (Do.WATCH_ON,)),
    Row(_SERVES, DrainAnnounced, S.SWITCHING, (Do.PUBLISH,), keep_roles, switches),
    Row(_SERVES, DrainAnnounced, S.DRAINING, (Do.PUBLISH,), keep_bound, unless(switches)),
    Row(_DRAINING, DrainAnnounced, None, (Do.MOVE_ATTEMPTS,), keep_bound, is_overdue, "with each heartbeat: what has no place yet may get one"),
    Row(_DRAINING, DrainAnnounced, None, (), keep_bound, unless(is_overdue)),
    Row(_MEMBERS, (EpochReplaced, GivenUp), S.LOST, (), keep_reason, note="restarted, or fenced by a peer (F44)"),
    Row((*_SERVES, S.DRAINING), LeftReceived, S.LEFT, (), keep_reason),
    Row(S.SWITCHING, LeftReceived, S.LEFT, (), keep_return, note="its next epoch joins when it has loaded what it lacks"),
)

IGNORES = (
    Ignore((S.JOINING, S.AWAITING_NAME), (HeartbeatReceived, DrainAnnounced, LeftReceived, EpochReplaced, GivenUp, NameContested), "not a member yet"),
    Ignore((S.JOINING, *_MEMBERS, *_ENDED), (HolderBeat,), "it does not wait for a name"),
    Ignore((*_MEMBERS, *_ENDED), (NameHeld,), "what it asked for was decided"),
    Ignore((S.JOINING, S.AWAITING_NAME, S.HEALTHY, S.SUSPECT, S.STUCK, *_DRAINING, *_ENDED), (ProbePassed, ProbeFailed), "late, or told twice: another one is asked for where it matters"),
    Ignore(_ENDED, (JoinAccepted, HeartbeatReceived, DrainAnnounced, LeftReceived, EpochReplaced, GivenUp, NameContested), "this epoch is over; the process must join with a new one"),
)

_TIMERS: Timers = {HeartbeatMissed: (Do.WATCH,), HeartbeatsEnded: (Do.WATCH, Do.WATCH_ON, Do.WATCH_JOINS)}
TABLE = Table("INSTANCE", __doc__ or "", S, S.JOINING, _ENDED, ROWS, IGNORES, timers=_TIMERS)
# fmt: on


class Instance(Machine):
    """One epoch of an instance: `key` is `id:epoch`."""

    table = TABLE
    __slots__ = (
        *("drain_left_s", "held_version", "info", "load", "next_roles", "num_probes"),
        *("reason", "seen_s"),
    )

    def __init__(
        self, info: InstanceInfo, load: Load, now_s: float, journal: Journal = NULL_JOURNAL
    ) -> None:
        super().__init__(f"{info.address.instance_id}:{info.address.epoch}", journal)
        self.info = info
        self.load = load
        self.seen_s = now_s
        self.drain_left_s = math.inf  # until its open work is to move elsewhere, if it drains
        self.next_roles: tuple[str, ...] = ()  # that its process returns with
        self.held_version = 0  # of the registry when it asked for a name that another has
        self.num_probes = 0  # number of the last self-test that was asked for
        self.reason = ""  # why it is over, waits, or gets no work

    def asked_for(self, info: InstanceInfo) -> EpochReplaced | NameContested:
        """What it means that this process joins under its name.  A lineage is of one parent, which
        starts a life when it has seen the end of the one before."""
        own = self.info
        is_next = info.lineage == own.lineage != "" and info.address.epoch > own.address.epoch
        return EpochReplaced() if is_next else NameContested(info)

    @property
    def takes_work(self) -> bool:
        return self.state is S.HEALTHY

    @property
    def is_draining(self) -> bool:
        return self.state in _DRAINING

    @property
    def is_overdue(self) -> bool:
        """Whether what is open there is to move."""
        return self.state in _DRAINING and self.drain_left_s <= 0.0

    @property
    def is_heard(self) -> bool:
        return self.state in _MEMBERS and self.state is not S.SUSPECT

    @property
    def was_lost(self) -> bool:
        """Gone without a message."""
        return self.state is S.LOST

    @property
    def present(self) -> bool:
        """A member: peers may talk to it."""
        return self.state in _MEMBERS
