"""LINK: a doubt whether the link to a peer carries messages, from its cause to its end.

Theory of operation
-------------------
Silence is no sign: a peer that computes has nothing to send.  A process may be healthy at the
gateway while its link to one peer, in one direction, carries nothing, for good (fault F48).  A
time-out proves only that time has passed.  So a message that is repeated, or has no place in the
queue, makes its sender doubt the link.  A probe asks the peer, which answers at once by an echo,
whatever it computes.  There and back must work for that.

No echo: the link is opened anew, and by the next probe the peer opens its own direction, too.  The
pair is MUTE meanwhile: it is reported to the gateway, which places nothing new on it while there is
another.  No echo over the new link either: it is no fault of the connection, and what waits for
that peer is given up here, to be tried elsewhere.  The peer is not lost by that: it may be alive
and write, so memory goes the way of a time-out.  The doubt lasts as long as a registry counts that
life among the living: one that vanished while there was none will never be declared lost.

A doubt owns nothing: the connection is the bus's, and what waits for the peer is its own owners'.
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
    Row,
    State,
    Table,
    Timers,
)
from epd.records import Address


class S(State):
    ASKED = "a message had to be said again; an echo is awaited"
    MUTE = "no echo came; the link was opened anew, an echo over it is awaited"
    UNREACHABLE = "none came over the new link either; what waited for the peer was given up"
    CARRIES = "an echo came"
    OVER = "that life of the peer has ended"


class Do(Effect):
    SEND_PROBE = "ask the peer for an echo"
    OPEN_ANEW = "give the connection up, and open another"
    TELL = "say that the pair is mute, or not any more"
    GIVE_UP = "tell every role that what waits for the peer waits in vain"
    ARM_RETRY = "fire RetryDue later"
    ARM_TIMEOUT = "fire EchoMissed later"


@dataclass(slots=True)
class Doubted(Event):
    """An answer did not come, or a message was refused."""


@dataclass(slots=True)
class EchoReceived(Event):
    pass


@dataclass(slots=True)
class EchoMissed(Event):
    by_time = True


@dataclass(slots=True)
class PeerForgotten(Event):
    """Its echo did not come either, and it will never be declared lost: no registry has that life
    any more, or a later one was listed."""

    by_time = True


@dataclass(slots=True)
class RetryDue(Event):
    by_time = True


@dataclass(slots=True)
class PeerLost(Event):
    """Its registry declared that life of the peer lost, or it was replaced."""


_OPEN = (S.ASKED, S.MUTE, S.UNREACHABLE)
_SILENT = (S.MUTE, S.UNREACHABLE)
_ANEW = (Do.OPEN_ANEW, Do.SEND_PROBE, Do.ARM_TIMEOUT)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.ASKED, Doubted, None, (Do.SEND_PROBE, Do.ARM_RETRY, Do.ARM_TIMEOUT)),
    Row(_OPEN, RetryDue, None, (Do.SEND_PROBE, Do.ARM_RETRY), note="probe or echo may be lost"),
    Row(S.ASKED, EchoReceived, S.CARRIES),
    Row(_SILENT, EchoReceived, S.CARRIES, (Do.TELL,)),
    Row(S.ASKED, (EchoMissed, PeerForgotten), S.MUTE, (*_ANEW, Do.TELL), note="F48"),
    Row(_SILENT, PeerForgotten, S.OVER, (Do.GIVE_UP,), note="nobody will ever say that it is lost; who misses it doubts again"),
    Row(_SILENT, EchoMissed, S.UNREACHABLE, (*_ANEW, Do.GIVE_UP), note="also what was begun since"),
    Row(_OPEN, PeerLost, S.OVER),
)

IGNORES = (
    Ignore(_SILENT, (Doubted,), "it is asked already"),
    Ignore((S.CARRIES, S.OVER), (Doubted, EchoReceived, PeerLost), "the doubt is over"),
)

_HELD: dict[State, str] = {S.UNREACHABLE: "only an echo or the peer's end says that it is reachable, or gone"}
_TIMERS: Timers = {RetryDue: (Do.ARM_RETRY,), EchoMissed: (Do.ARM_TIMEOUT,)}
TABLE = Table("LINK", __doc__ or "", S, S.ASKED, (S.CARRIES, S.OVER), ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class Link(Machine):
    """One doubt; `key` is the peer's name."""

    table = TABLE
    __slots__ = ("peer",)

    def __init__(self, peer: Address, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(peer.instance_id, journal)
        self.peer = peer

    @property
    def carries(self) -> bool:
        """Whether messages are still believed to arrive."""
        return self.state in (S.ASKED, S.CARRIES)

    @property
    def is_given_up(self) -> bool:
        """Whether what waits for the peer was given up, and anew would be."""
        return self.state is S.UNREACHABLE
