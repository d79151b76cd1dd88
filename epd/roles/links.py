"""The links to peers: LINK machines over the bus, at every instance and at the gateway.

A doubt is raised by a component that repeats a message (`Actor.doubt`), or by the bus when it
refuses one. It costs a probe and an echo, and within `link_timeout_s / 2` of an echo there is no
new doubt.
"""

from __future__ import annotations

from epd.config import Timing
from epd.fsm.kernel import Event
from epd.fsm.link import (
    Do,
    Doubted,
    EchoMissed,
    EchoReceived,
    Link,
    PeerForgotten,
    PeerLost,
    RetryDue,
)
from epd.messages import Address, LinkEcho, LinkProbe
from epd.roles.base import Actor, Component, performs, receives
from epd.transport.base import Received


class Links(Component[Link]):
    """One process's doubts, by the name of the peer."""

    fires = Link

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor)
        self._timing = timing
        self._doubts: dict[str, Link] = {}
        self._trusted_until_s: dict[str, float] = {}
        actor.doubt = self.doubt

    def live(self) -> dict[str, int]:
        return {"links_doubted": len(self._doubts)}

    def silent(self) -> tuple[str, ...]:
        """Peers that do not answer."""
        return tuple(sorted(name for name, link in self._doubts.items() if not link.carries))

    def is_given_up(self, peer: Address) -> bool:
        """Whether no wait goes on for a message of this peer."""
        link = self._doubts.get(peer.instance_id)
        return link is not None and link.is_given_up

    def doubt(self, peer: Address) -> None:
        """An answer of this peer did not come."""
        name = peer.instance_id
        if name in self._doubts or self.actor.is_self(peer) or self.actor.is_lost(peer):
            return
        if self._trusted_until_s.get(name, 0.0) > self.clock.now_s():
            return
        link = self._doubts[name] = Link(peer, self.actor.journal)
        self.post(link, Doubted())

    def peer_lost(self, peer: Address) -> None:
        self._trusted_until_s.pop(peer.instance_id, None)
        link = self._doubts.get(peer.instance_id)
        if link is not None and link.peer.epoch in (0, peer.epoch):
            self.post(link, PeerLost())

    # --- messages ---------------------------------------------------------------------------------

    @receives(LinkProbe)
    def on_probe(self, received: Received) -> None:
        if received.message.is_mute:
            self._open_anew(received.source)
        self.actor.send(Address(received.source, received.epoch, ""), LinkEcho())

    @receives(LinkEcho)
    def on_echo(self, received: Received) -> None:
        link = self._doubts.get(received.source)
        if link is not None and link.peer.epoch in (0, received.epoch):
            trusted_s = self._timing.link_timeout_s / 2
            self._trusted_until_s[link.key] = self.clock.now_s() + trusted_s
            self.fire(link, EchoReceived())

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.SEND_PROBE)
    def send_probe(self, link: Link, event: Event) -> None:
        self.actor.send(link.peer, LinkProbe(is_mute=isinstance(event, EchoMissed | PeerForgotten)))

    @performs(Do.OPEN_ANEW)
    def open_anew(self, link: Link, event: Event) -> None:
        self._open_anew(link.key)

    def _open_anew(self, name: str) -> None:
        self.actor.counters["links_opened_anew"] += 1
        self.actor.bus.reopen(name)

    @performs(Do.TELL)
    def tell(self, link: Link, event: Event) -> None:
        if link.carries:
            self.actor.log.info("the link carries messages again", peer=link.key)
        else:
            log = self.actor.log  # who joins may be there before its gateway
            is_young = self.actor.memberships and not self.actor.known_by()
            warn = log.info if is_young else log.warning
            warn("no answer; the link is opened anew", peer=link.key)

    @performs(Do.GIVE_UP)
    def give_up(self, link: Link, event: Event) -> None:
        for component in self.actor.components:
            component.peer_silent(link.peer)

    @performs(Do.ARM_RETRY)
    def arm_retry(self, link: Link, event: Event) -> None:
        self.arm(link, self._timing.retry_interval_s, RetryDue())

    @performs(Do.ARM_TIMEOUT)
    def arm_timeout(self, link: Link, event: Event) -> None:
        def missed() -> None:
            self.fire(link, PeerForgotten() if self._is_absent(link.peer) else EchoMissed())

        self.actor.timers.arm(link, EchoMissed, self._timing.link_timeout_s, missed)

    def _is_absent(self, peer: Address) -> bool:
        """Its registry began anew, and that life did not join it; or a later one did.  A life
        that no registry has listed here is not declared lost."""
        is_known = self.actor.peer_info(peer) is not None
        return self.actor.is_lost(peer) or (is_known and not self.actor.is_listed(peer))

    def ended(self, machine: Link) -> None:
        if self._doubts.get(machine.key) is machine:
            del self._doubts[machine.key]
