"""Membership of an instance: join, heartbeat, learn of peers, drain, leave.

Joining is repeated until the gateway answers, so any start order works (faults F17, F18), and a
gateway that restarts is joined again when it says that it does not know us.  The gateway owns the
registry (fault F35); here only its latest copy is kept: peers to connect to, and epochs that it
declared lost, which every role is told so that it fences them.

An instance that is itself declared lost must not go on: its peers have fenced this epoch.  It says
so through `on_expelled`, and its process ends; its parent starts it anew with a new epoch (F44).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

from epd.config import Timing
from epd.messages import (
    PROTOCOL_VERSION,
    Address,
    Heartbeat,
    HeartbeatAck,
    InstanceInfo,
    Join,
    JoinRefused,
    Leave,
    Load,
    Membership,
    Welcome,
)
from epd.roles.base import Actor, Role, receives
from epd.scheduling import pairing
from epd.transport.base import Received


def absent_after_s(timing: Timing) -> float:
    """How long after a registry's start those who knew a member still take it for living.  All who
    live have joined by then: they miss the former registry after `lost_after_s`.  Who comes later
    may have been fenced, and is refused."""
    return 3 * timing.lost_after_s


class Member(Role[Never]):
    """One instance's side of the registry."""

    def __init__(
        self,
        actor: Actor,
        gateway: Address,
        info: InstanceInfo,
        fingerprint: str,
        timing: Timing,
        load: Callable[[], Load],
    ) -> None:
        super().__init__(actor)
        actor.knows_time = False
        actor.is_former = self._is_former
        self._gateway = gateway
        self._info = info
        self._fingerprint = fingerprint
        self._timing = timing
        self._load = load
        self._version = 0
        self._gateway_epoch = 0
        self._registry_epoch = 0  # whose registry `_listed` is of
        self._listed: set[tuple[str, int]] = set()
        self._beat_s = timing.heartbeat_interval_s
        self.welcomed = False
        self.draining = False
        self.on_expelled: Callable[[str], None] = lambda reason: None
        self.on_welcome: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.actor.connect(self._gateway)
        self._join()

    # --- joining ----------------------------------------------------------------------------------

    def _join(self) -> None:
        lost = dict(sorted(self.actor.lost))  # the last life of each
        fingerprint, told = self._fingerprint, tuple(lost.items())
        join = Join(PROTOCOL_VERSION, fingerprint, self._info, self.welcomed, told)
        self.actor.send(self._gateway, join)
        self.actor.arm("member/join", self._timing.retry_interval_s, self._join)

    @receives(Welcome)
    def on_welcomed(self, received: Received) -> None:
        message: Welcome = received.message
        if message.epoch != self._info.address.epoch or self._is_former(received):
            return
        self.actor.disarm("member/join")
        self._follow(received)
        self._set_time(message.cluster_s)
        self._beat_s = message.heartbeat_interval_s
        if not self.welcomed:
            self.welcomed = True
            self.on_welcome()
        self._watch()  # from now on: the very first answer may not come
        self._beat()

    @receives(JoinRefused)
    def on_refused(self, received: Received) -> None:
        message: JoinRefused = received.message
        if message.epoch == self._info.address.epoch and not self._is_former(received):
            self.actor.disarm("member/join")
            self.actor.disarm("member/beat")
            self.on_expelled(message.reason)

    def _is_former(self, received: Received) -> bool:
        """Words of a gateway's earlier life may arrive when the next one has welcomed us: its view
        of the members is over (F44).  Epochs rise, unless a clock was set back; so one that is
        silent does not stand in the way of whoever speaks."""
        if received.epoch >= self._gateway_epoch or not self.actor.armed("member/silence"):
            return False
        self.actor.counters["message_of_other_epoch"] += 1
        return True

    def _follow(self, received: Received) -> None:
        """Of a new gateway: nobody reads the former one's requests any more, and it counts anew."""
        if self._gateway_epoch not in (0, received.epoch):
            self._note_lost(Address(received.source, self._gateway_epoch, ""))
            self._version = 0
        self._gateway_epoch = received.epoch

    # --- heartbeats -------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.actor.send(self._gateway, Heartbeat(self._load(), self._version, self.draining))
        self.actor.arm("member/beat", self._beat_s, self._beat)

    @receives(HeartbeatAck)
    def on_heartbeat_ack(self, received: Received) -> None:
        if self._is_former(received):
            return
        self._watch()
        message: HeartbeatAck = received.message
        self._set_time(message.cluster_s)
        missed = message.known and self._version < message.version  # a `Membership` was lost
        if (missed or not message.known) and not self.actor.armed("member/join"):
            self._join()  # is answered with the whole registry

    def _set_time(self, cluster_s: float) -> None:
        """Late by the word's own way.  The last word counts: machines may sleep, and their clocks
        with them."""
        self.actor.cluster_offset_s = cluster_s - self.clock.now_s()
        self.actor.knows_time = True

    def _watch(self) -> None:
        self.actor.arm("member/silence", self._timing.lost_after_s, self._rejoin)

    def _rejoin(self) -> None:
        """The gateway has not answered for long: it may be a new one that does not know us."""
        self.actor.doubt(self._gateway)
        self._join()

    # --- peers ------------------------------------------------------------------------------------

    @receives(Membership)
    def on_membership(self, received: Received) -> None:
        message: Membership = received.message
        if self._is_former(received):
            return
        self._follow(received)
        if message.version <= self._version:
            return
        if received.epoch != self._registry_epoch:
            self._registry_epoch, self._listed = received.epoch, set()
            absent_s = absent_after_s(self._timing)
            self.actor.arm("member/absent", absent_s, self._forget_absent)
        self._version = message.version
        own = self._info.address.instance_id
        for info in message.instances:
            address = info.address
            key = (address.instance_id, address.epoch)
            if address.instance_id != own and key not in self.actor.peers:
                self.actor.connect(address)
                self._note_replaced(address)
            if key not in self.actor.peers:
                self._log_transport(info)
            self.actor.peers[key] = info
        for address in message.lost:
            self._note_lost(address)
        present = {(i.address.instance_id, i.address.epoch) for i in message.instances}
        self._forget_old(present)
        self._listed |= present
        self.actor.listed |= present
        if present & self.actor.lost and not self.actor.armed("member/join"):
            self._join()  # a former registry said otherwise: this one has to know

    def _forget_absent(self) -> None:
        """A registry that starts anew has had time to hear from all who live."""
        self.actor.listed = set(self._listed)

    def _log_transport(self, info: InstanceInfo) -> None:
        is_self = self.actor.is_self(info.address)
        if not is_self and pairing.exchange(self._info, info):
            name = pairing.choose(self._info, info)
            self.actor.log.info(
                "rows and KV move over", transport=name, peer=info.address.instance_id
            )

    def _note_lost(self, address: Address) -> None:
        key = (address.instance_id, address.epoch)
        if key in self.actor.lost:
            return
        self.actor.lost.add(key)
        for role in self.actor.roles:
            role.peer_lost(address)

    def _note_replaced(self, address: Address) -> None:
        """Earlier lives of this peer are over, also those that this registry never knew: the
        instance may have restarted while there was no gateway."""
        for name, epoch in list(self.actor.peers):
            if name == address.instance_id and epoch < address.epoch:
                self._note_lost(self.actor.peers[name, epoch].address)

    def _forget_old(self, present: set[tuple[str, int]]) -> None:
        """Peers that are neither present nor lost left in order; lost ones stay for fencing.

        Only what this very registry has listed can have left it: a gateway that starts anew learns
        of its instances one by one, and those that have not joined it yet are alive.
        """
        for key in sorted(self._listed):
            if key not in present and key not in self.actor.lost:
                self._note_lost(self.actor.peers[key].address)

    # --- leaving ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new work; the composition root calls `leave` when nothing is open."""
        self.draining = True
        if self.welcomed:
            self._beat()  # says it, as does each that follows

    def leave(self) -> None:
        self.actor.disarm("member/join")
        self.actor.disarm("member/beat")
        self.actor.disarm("member/silence")
        self.actor.send(self._gateway, Leave())
