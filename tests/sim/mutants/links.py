"""Bugs of links put back: nobody asks why no answer comes (F48)."""

from __future__ import annotations

from typing import Any

from epd.fsm import link
from epd.fsm.outgoing import Outgoing
from epd.fsm.room import RetryDue, Room
from epd.messages import Address, Grant, LinkEcho
from epd.roles.incoming import IncomingRooms
from epd.roles.links import Links
from epd.roles.outgoing import OutgoingRooms
from epd.roles.rooms import Rooms
from epd.transport.base import Received
from tests.sim.mutants.planting import Planted, mutant, patched, row

L = link.S
LINK = link.Link.table


@mutant
def no_link_is_doubted() -> Planted:
    """F48: the watchdog is off: messages are said again and again over a link that carries none."""

    def trust(self: Links, peer: Address) -> None:
        return

    return patched(Links, "doubt", trust)


@mutant
def who_is_in_doubt_trusts_the_link() -> Planted:
    """F8, F48: who waits for the writer's last message asks once why it does not come (swarm
    61001035)."""

    def ask(self: Rooms[Any, Any], room: Room) -> None:
        if not room.terminal:
            self.arm(room, self._timing.retry_interval_s, RetryDue())

    return patched(Rooms, "_ask_again", ask)


@mutant
def the_forgotten_is_not_acknowledged() -> Planted:
    """F48: a commit of a room that was forgotten is dropped: its blocks stay (swarm
    1795870400056)."""

    def on_commit(self: IncomingRooms, received: Received) -> None:
        if self.find(received.message.room) is not None:
            hear(self, received)

    hear = IncomingRooms.on_commit
    return patched(IncomingRooms, "on_commit", on_commit)


@mutant
def only_the_own_direction_is_opened() -> Planted:
    """F48: a peer that is told that it cannot be heard leaves its direction as it is."""

    def answer(self: Links, received: Received) -> None:
        self.actor.send(Address(received.source, received.epoch, ""), LinkEcho())

    return patched(Links, "on_probe", answer)


@mutant
def the_silent_are_waited_for() -> Planted:
    """F48: a peer that does not answer over a new link either is waited for until the deadline."""
    return row(LINK, L.MUTE, link.EchoMissed, L.UNREACHABLE, (link.Do.SEND_PROBE,))


@mutant
def grants_are_kept_until_their_deadline() -> Planted:
    """F42, F43: a grant that a link held up opens a room that is over, and that nobody ends before
    its deadline (swarm 1797000002512)."""

    def wait(self: OutgoingRooms, outgoing: Outgoing, grant: Grant) -> None:
        return

    return patched(OutgoingRooms, "_await_request", wait)
