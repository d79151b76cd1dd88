"""MEMBERSHIP: one life of an instance, as it sees its place in the registry of one gateway.

Theory of operation
-------------------
A gateway owns its registry (INSTANCE, fault F35); this machine is the other half. An instance
asks to join again and again until it is answered, so any start order works (faults F17, F18). The
welcome brings the gateway's time. No deadline can be read without it, so no work of that gateway
is taken before it.

A member that the gateway lacks, or that has missed an update, is REJOINING while the gateway still
sends messages: it asks again, and is answered with the whole registry. A silent gateway may be a
new one without this member: in CUT_OFF the member asks it, and follows the first gateway that
answers. In every other state messages of an earlier life of the gateway are ignored (fault F44).
Open work goes on meanwhile: the instance only gets no new work.

An instance of several gateways has one machine for each. A gateway that is silent while another one
speaks is FORSAKEN: it has ended, or is cut off from here, so nobody reads what its requests come
to. They are cancelled, and the gateway is asked again and again. When it returns, this life goes on
with it, unless it has declared this life lost.

A draining instance takes no new work; all else is as before. It must still learn which peers are
lost, so it asks as a member does. At its bound it still works on what is open, and the gateway
moves that elsewhere. It leaves when nothing is open, or when the time for the moves is over, too.
A process that is to have other roles drains so; its next life joins with them.

A life that a gateway has declared lost must not go on, because its peers have fenced it: it is over
at all gateways. EXPELLED ends it, and the next life joins (fault F44): of the same process, once
nothing that this one began moves a byte any more, else of another one. REJECTED was never a member:
it does not fit, or another has its name and lives, and its next life would not get further either.

Where another has the name and may be dead, the gateway has the newcomer wait: it is AWAITING_NAME
and asks on. If the other ran on this host and its process is gone, the newcomer's join reports it,
and it is welcomed at once (F78).
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
from epd.records import InstanceInfo


class Do(Effect):
    SEND_JOIN = "ask the gateway for a place, and for the registry"
    ARM_JOIN = "fire JoinDue later"
    TAKE_TIME = "take the gateway's time"
    ARM_SILENCE = "fire GatewayFellSilent, unless it speaks"
    BEAT = "say now that it lives and whether it drains, and from now on every interval"
    DOUBT = "have the link to the gateway asked for an echo"
    NOTE_FORMER_LOST = "tell every role that the gateway's former life is over"
    FORSAKE = "tell every role that nobody reads what this gateway's requests come to"
    TELL_SERVING = "tell the process that it serves"
    FORGET_ABSENT = "take those that the new registry does not list for gone"
    ARM_ABSENT = "fire AbsenceSettled when all who live have joined the new registry"
    LET_GO = "tell every role that no new work comes"
    ARM_DRAIN = "fire DrainTimedOut at its bound, and MoveTimedOut behind it"
    SEND_LEAVE = "tell the gateway"
    LOOK_FOR_HOLDER = "ask the kernel whether the process that has the name is gone"
    TELL_WAITING = "tell the process for whom it waits"
    REJECT = "tell the process that it does not fit"
    EXPEL = "tell the process that this life is over"


class Own(Owned):
    PLACE = "a place at the gateway, had or asked for", Do.SEND_LEAVE


class S(State):
    OUTSIDE = "not started; nobody knows it"
    JOINING = "asks for a place; takes no work, for it cannot read a deadline", Own.PLACE
    AWAITING_NAME = "asks for a place under a name that another has, who may be dead", Own.PLACE
    MEMBER = "takes work", Own.PLACE
    REJOINING = "takes work; has asked for the registry again", Own.PLACE
    CUT_OFF = "takes work; the gateway is silent, and is asked again and again", Own.PLACE
    FORSAKEN = "takes no work of a gateway that is silent beside one that is not", Own.PLACE
    DRAINING = "finishes its work, takes no new", Own.PLACE
    DRAINING_REJOINING = "finishes its work; has asked for the registry again", Own.PLACE
    DRAINING_CUT_OFF = (
        "finishes its work; the gateway is silent, and is asked again and again",
        Own.PLACE,
    )
    DRAINING_FORSAKEN = "finishes the work of other gateways; this one is silent", Own.PLACE
    REJECTED = "never was a member, and does not fit"
    EXPELLED = "was declared lost: its peers have fenced it"
    LEFT = "said good-bye"


@dataclass(slots=True)
class JoinDue(Event):
    """The process has started, or no answer came to what was asked."""

    by_time = True


@dataclass(slots=True)
class Welcomed(Event):
    cluster_s: float
    beat_s: float
    gateway_epoch: int


@dataclass(slots=True)
class Acknowledged(Event):
    """The gateway has a heartbeat of it, and there is nothing new."""

    cluster_s: float


@dataclass(slots=True)
class NewsMissed(Event):
    """The gateway has one that lacks changes: they were lost on their way here."""

    cluster_s: float


@dataclass(slots=True)
class Forgotten(Event):
    """The gateway has one, of no member that it has."""

    cluster_s: float


@dataclass(slots=True)
class LostOneListed(Event):
    """Its registry has a life that an earlier one declared lost, which it has to learn."""


@dataclass(slots=True)
class GatewayReplaced(Event):
    former_epoch: int
    epoch: int


@dataclass(slots=True)
class RegistryBegan(Event):
    """The first message of this registry, which learns of its instances one by one."""


@dataclass(slots=True)
class AbsenceSettled(Event):
    by_time = True


@dataclass(slots=True)
class GatewayFellSilent(Event):
    by_time = True


@dataclass(slots=True)
class OtherHeard(Event):
    """Another gateway speaks."""


@dataclass(slots=True)
class Refused(Event):
    ends = (Own.PLACE,)
    reason: str


@dataclass(slots=True)
class DeclaredLost(Event):
    """Refused, since this life is over."""

    ends = (Own.PLACE,)
    reason: str


@dataclass(slots=True)
class NameTaken(Event):
    """Another has its name, and may be alive."""

    holder: InstanceInfo


@dataclass(slots=True)
class HolderGone(Event):
    """By the kernel, the process that had the name has ended."""


@dataclass(slots=True)
class DrainRequested(Event):
    due_s: float  # its bound, by this process's clock
    next_roles: tuple[str, ...] = ()  # of the process behind it; none: it ends


@dataclass(slots=True)
class DrainTimedOut(Event):
    """What is open is to move to other instances."""

    by_time = True


@dataclass(slots=True)
class MoveTimedOut(Event):
    by_time = True


@dataclass(slots=True)
class LeaveRequested(Event):
    """Nothing is open."""


_WORKING = (S.MEMBER, S.REJOINING, S.CUT_OFF)
_FORSAKEN = (S.FORSAKEN, S.DRAINING_FORSAKEN)
_DRAINING = (S.DRAINING, S.DRAINING_REJOINING, S.DRAINING_CUT_OFF, S.DRAINING_FORSAKEN)
_JOINED = (*_WORKING, S.FORSAKEN, *_DRAINING)
_ASKING = (S.JOINING, S.AWAITING_NAME)  # for its first place
_OPEN = (*_ASKING, *_JOINED)
_HEARING = (S.MEMBER, S.REJOINING, S.DRAINING, S.DRAINING_REJOINING)  # a gateway
_ENDED = (S.REJECTED, S.EXPELLED, S.LEFT)


Heard = Welcomed | Acknowledged | NewsMissed | Forgotten  # what tells the gateway's time


def keep_interval(membership: Membership, event: Welcomed) -> None:
    membership.beat_s, membership.gateway_epoch = event.beat_s, event.gateway_epoch


def follow(membership: Membership, event: GatewayReplaced) -> None:
    membership.gateway_epoch = event.epoch


def keep_bound(membership: Membership, event: DrainRequested) -> None:
    membership.drain_due_s, membership.next_roles = event.due_s, event.next_roles


_ASK = (Do.SEND_JOIN, Do.ARM_JOIN)
_HEARD = (Do.TAKE_TIME, Do.ARM_SILENCE)
_DRAIN = (Do.LET_GO, Do.BEAT, Do.ARM_DRAIN)


# One line per row, as the table that it is.
# fmt: off
def _joined(known: S, rejoining: S, cut_off: S, forsaken: S) -> tuple[Row, ...]:
    silent = (cut_off, forsaken)
    return (
        Row((known, rejoining, *silent), Welcomed, known, (*_HEARD, Do.BEAT), keep_interval),
        Row((known, rejoining), Acknowledged, None, _HEARD),
        Row(known, (NewsMissed, Forgotten), rejoining, (*_HEARD, *_ASK)),
        Row(rejoining, (NewsMissed, Forgotten), None, _HEARD, note="it was asked"),
        Row(silent, (Acknowledged, NewsMissed, Forgotten), rejoining, _HEARD, note="it was asked, and has to answer"),
        Row(known, LostOneListed, rejoining, _ASK),
        Row((known, rejoining), GatewayFellSilent, cut_off, (Do.DOUBT, *_ASK)),
        Row((rejoining, cut_off), JoinDue, None, _ASK, note="the message or its answer may be lost"),
        Row(cut_off, OtherHeard, forsaken, (Do.FORSAKE,), note="it is not this instance that is cut off from all"),
        Row(forsaken, JoinDue, None, (Do.DOUBT, *_ASK), note="its link may be mute (F48)"),
        Row((known, rejoining), GatewayReplaced, None, (Do.NOTE_FORMER_LOST,), follow),
        Row(silent, GatewayReplaced, rejoining, (Do.NOTE_FORMER_LOST, Do.ARM_SILENCE), follow, note="one speaks: its former life is heard no more"),
    )


ROWS = (
    Row(S.OUTSIDE, JoinDue, S.JOINING, _ASK),
    Row(S.JOINING, JoinDue, None, (Do.DOUBT, *_ASK), note="there may be no gateway yet (F17, F18), or the link to it is mute (F48)"),
    Row(_ASKING, Welcomed, S.MEMBER, (Do.TAKE_TIME, Do.TELL_SERVING, Do.ARM_SILENCE, Do.BEAT), keep_interval),
    Row(_ASKING, Refused, S.REJECTED, (Do.REJECT,), note="version, model or layout differ (F11), or its name is another's (F78)"),
    Row(_ASKING, DrainRequested, S.LEFT, note="it has no work; its welcome may be on its way"),
    Row(S.JOINING, NameTaken, S.AWAITING_NAME, (Do.TELL_WAITING, Do.LOOK_FOR_HOLDER, Do.ARM_SILENCE), note="F78"),
    Row(S.AWAITING_NAME, NameTaken, None, (Do.LOOK_FOR_HOLDER, Do.ARM_SILENCE)),
    Row(S.AWAITING_NAME, JoinDue, None, _ASK, note="the gateway decides when the other has answered or is lost"),
    Row(S.AWAITING_NAME, HolderGone, None, _ASK, note="the join says so"),
    Row(S.AWAITING_NAME, GatewayFellSilent, S.JOINING, _ASK, note="its successor decides anew"),
    *_joined(S.MEMBER, S.REJOINING, S.CUT_OFF, S.FORSAKEN),
    Row(S.MEMBER, DrainRequested, S.DRAINING, _DRAIN, keep_bound),
    Row(S.REJOINING, DrainRequested, S.DRAINING_REJOINING, _DRAIN, keep_bound),
    Row(S.CUT_OFF, DrainRequested, S.DRAINING_CUT_OFF, _DRAIN, keep_bound),
    Row(S.FORSAKEN, DrainRequested, S.DRAINING_FORSAKEN, _DRAIN, keep_bound),
    *_joined(S.DRAINING, S.DRAINING_REJOINING, S.DRAINING_CUT_OFF, S.DRAINING_FORSAKEN),
    Row(_DRAINING, DrainTimedOut, None, (Do.BEAT,), note="the gateway moves what is open while it goes on here"),
    Row(_DRAINING, MoveTimedOut, S.LEFT, note="what is open migrates as after a loss"),
    Row(_OPEN, LeaveRequested, S.LEFT),
    Row(_JOINED, RegistryBegan, None, (Do.ARM_ABSENT,)),
    Row(_JOINED, AbsenceSettled, None, (Do.FORGET_ABSENT,)),
    Row(_JOINED, Refused, S.EXPELLED, (Do.EXPEL,), note="F44"),
    Row(_OPEN, DeclaredLost, S.EXPELLED, (Do.EXPEL,), note="F44; its welcome may have been lost, or another gateway's"),
)

IGNORES = (
    Ignore((S.REJOINING, S.DRAINING_REJOINING, S.CUT_OFF, S.DRAINING_CUT_OFF, *_FORSAKEN), (LostOneListed,), "it asks already, and says it"),
    Ignore((*_ASKING, *_HEARING, *_FORSAKEN), (OtherHeard,), "nothing is open there whose reader is gone"),
    Ignore(_DRAINING, (DrainRequested,), "said before"),
    Ignore(_JOINED, (NameTaken, HolderGone), "it has been welcomed since"),
    Ignore((S.JOINING,), (HolderGone,), "it asks anew"),
    Ignore(_ENDED, (Welcomed, Acknowledged, NewsMissed, Forgotten, LostOneListed, GatewayReplaced, RegistryBegan, OtherHeard, Refused, DeclaredLost, NameTaken, HolderGone, DrainRequested, LeaveRequested), "this life is over"),
)

_ANY_ORDER = "only the gateway's message ends it: instances may start first"
_SILENT = "only a gateway's message ends it, and its own work goes on meanwhile"
_HELD: dict[State, str] = {S.JOINING: _ANY_ORDER, S.CUT_OFF: _SILENT, S.FORSAKEN: _SILENT}
_TIMERS: Timers = {
    JoinDue: (Do.ARM_JOIN,),
    GatewayFellSilent: (Do.ARM_SILENCE,),
    AbsenceSettled: (Do.ARM_ABSENT,),
    DrainTimedOut: (Do.ARM_DRAIN,),
    MoveTimedOut: (Do.ARM_DRAIN,),
}
TABLE = Table("MEMBERSHIP", __doc__ or "", S, S.OUTSIDE, _ENDED, ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class Membership(Machine):
    """`key` is `id:epoch`, as the gateway's INSTANCE of this life; behind it the gateway, if the
    instance has several."""

    table = TABLE
    __slots__ = ("beat_s", "drain_due_s", "gateway_epoch", "next_roles")

    def __init__(self, key: str, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(key, journal)
        self.beat_s = 0.0  # how often the gateway wants to hear of us
        self.drain_due_s = 0.0  # its bound, if it drains
        self.next_roles: tuple[str, ...] = ()  # of its process, behind the drain
        self.gateway_epoch = 0  # of the life that was followed last

    @property
    def was_welcomed(self) -> bool:
        """And so has the gateway's time."""
        return self.state not in (S.OUTSIDE, *_ASKING, S.REJECTED)

    @property
    def is_draining(self) -> bool:
        return self.state in _DRAINING

    @property
    def is_heard(self) -> bool:
        """Whether the gateway speaks, to a member of it."""
        return self.state in _HEARING

    @property
    def is_forsaken(self) -> bool:
        return self.state in _FORSAKEN

    def is_former(self, epoch: int) -> bool:
        """Whether this is an earlier life of a gateway that speaks: its messages are over (F44).
        Epochs rise, unless a clock was set back; so one that is silent does not stand in the way of
        whoever speaks."""
        return epoch < self.gateway_epoch and self.is_heard

    @property
    def objection(self) -> str:
        """Why no new work is taken; empty if it is."""
        if self.state in _WORKING:
            return ""
        if self.state is S.FORSAKEN:
            return "does not hear the request's gateway"
        return "is draining" if self.was_welcomed else "has not heard its welcome yet"
