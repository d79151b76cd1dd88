"""Membership of an instance: MEMBERSHIP's effects, and its copy of the registry.

The gateway owns the registry (fault F35); here only its latest copy is kept: peers to connect to,
and lost epochs, which every role gets to fence them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd.config import Timing
from epd.fsm.kernel import Event
from epd.fsm.membership import (
    AbsenceSettled,
    Acknowledged,
    Do,
    DrainRequested,
    DrainTimedOut,
    Forgotten,
    GatewayFellSilent,
    GatewayReplaced,
    Heard,
    HolderGone,
    JoinDue,
    LeaveRequested,
    LostOneListed,
    MoveTimedOut,
    NameTaken,
    NewsMissed,
    Refused,
    RegistryBegan,
    Welcomed,
)
from epd.fsm.membership import Membership as MembershipMachine
from epd.messages import (
    OF_GATEWAY,
    PROTOCOL_VERSION,
    AdapterList,
    Address,
    DrainRequest,
    Heartbeat,
    HeartbeatAck,
    InstanceInfo,
    Join,
    JoinDeferred,
    JoinRefused,
    Leave,
    Load,
    Membership,
    Welcome,
)
from epd.roles.base import Actor, Component, performs, receives
from epd.scheduling import pairing
from epd.transport.base import Received


def absent_after_s(timing: Timing) -> float:
    """How long after a registry's start those who knew a member still take it for living.  All who
    live have joined by then: they miss the former registry after `lost_after_s`.  Who comes later
    may have been fenced, and is refused."""
    return 3 * timing.lost_after_s


class Member(Component[MembershipMachine]):
    """One instance's side of the registry."""

    fires = MembershipMachine

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
        key = f"{info.address.instance_id}:{info.address.epoch}"
        self.membership = actor.membership = MembershipMachine(key, actor.journal)
        self._gateway = gateway
        self._info = info
        self._fingerprint = fingerprint
        self._timing = timing
        self._load = load
        self.version = 0  # of the list that it has
        self._registry_epoch = 0  # whose registry `_listed` is of
        self._listed: set[tuple[str, int]] = set()
        self.on_rejected: Callable[[str], None] = lambda reason: None
        self.on_expelled: Callable[[str], None] = lambda reason: None
        self.on_welcome: Callable[[], None] = lambda: None
        self.on_drain_asked: Callable[[bool, tuple[str, ...]], None] = lambda restarts, roles: None
        self.on_waiting: Callable[[InstanceInfo], None] = lambda holder: None
        self.adapters: Callable[[], tuple[AdapterList | None, int]] = lambda: (None, 0)
        """The last list of them, and the epoch of the gateway that sent it."""
        self.on_list: Callable[[Sequence[InstanceInfo]], None] = lambda members: None
        self.is_gone: Callable[[InstanceInfo], bool] = lambda other: False
        """Whether that process of this host has ended, by the host's kernel."""
        actor.admits = self._admits

    def _admits(self, received: Received) -> bool:
        """Messages of the gateway; of a life that a registry has listed, all but the gateway's own
        kinds.  An instance may send before its listing is here: that is repeated, as if lost."""
        if received.source == self._gateway.instance_id:
            return True
        is_told_of = (received.source, received.epoch) in self.actor.peers
        return is_told_of and type(received.message) not in OF_GATEWAY

    def start(self) -> None:
        self.actor.connect(self._gateway)
        self.post(self.membership, JoinDue())

    def _fire(self, event: Event) -> None:
        self.fire(self.membership, event)

    def drain(self, within_s: float | None = None, roles: tuple[str, ...] = ()) -> None:
        """Take no new work; call `leave` when nothing is open.  `within_s`: its bound, if not that
        of the settings; whoever drains already keeps the first.  `roles`: of the next life."""
        within_s = self._timing.drain_timeout_s if within_s is None else within_s
        self.post(self.membership, DrainRequested(self.clock.now_s() + within_s, roles))

    def leave(self) -> None:
        self.post(self.membership, LeaveRequested())

    # --- the gateway's messages -------------------------------------------------------------------

    @receives(Welcome)
    def on_welcomed(self, received: Received) -> None:
        message: Welcome = received.message
        if message.epoch != self._info.address.epoch or self.actor.is_former(received):
            return
        self._follow(received)
        if not self.membership.was_welcomed and (reason := self._far_off(message.wall_s)):
            self._fire(Refused(reason))
            return
        self._fire(Welcomed(message.cluster_s, message.heartbeat_interval_s, received.epoch))

    def _far_off(self, wall_s: float) -> str:
        """Why no new life can begin by the clock of this host; empty if one can.  Logs and the age
        of shared files are by it; a member is not given up for it, since no deadline is."""
        skew_s, most_s = self.clock.wall_s() - wall_s, self._timing.max_clock_skew_s
        if not most_s or abs(skew_s) <= most_s:
            return ""
        way = "ahead of" if skew_s > 0 else "behind"
        return (
            f"the clock of this host is {abs(skew_s):.0f} s {way} the gateway's; set both by NTP "
            "(chronyd or systemd-timesyncd), or raise timing.max_clock_skew_s"
        )

    @receives(JoinRefused)
    def on_refused(self, received: Received) -> None:
        message: JoinRefused = received.message
        if message.epoch == self._info.address.epoch and not self.actor.is_former(received):
            self._fire(Refused(message.reason))

    @receives(JoinDeferred)
    def on_deferred(self, received: Received) -> None:
        message: JoinDeferred = received.message
        if message.epoch == self._info.address.epoch and not self.actor.is_former(received):
            self._fire(NameTaken(message.holder))

    @receives(DrainRequest)
    def on_drain_request(self, received: Received) -> None:
        message: DrainRequest = received.message
        if not self.actor.is_former(received):
            self.drain(message.within_s, message.roles)
            self.on_drain_asked(message.restarts, message.roles)

    @receives(HeartbeatAck)
    def on_heartbeat_ack(self, received: Received) -> None:
        if not self._hears(received):
            return
        message: HeartbeatAck = received.message
        if not message.known:
            self._fire(Forgotten(message.cluster_s))
        elif self.version < message.version:
            self._fire(NewsMissed(message.cluster_s))
        else:
            self._fire(Acknowledged(message.cluster_s))

    def _hears(self, received: Received) -> bool:
        """Whoever speaks is followed, and from then on its former lives are over, whatever of them
        comes late.  Before the welcome nobody is: no clock would end that, if it fell silent."""
        if not self.actor.knows_time or self.actor.is_former(received):
            return False
        self._follow(received)
        return True

    def _follow(self, received: Received) -> None:
        """Of a new gateway: it counts anew."""
        former = self.membership.gateway_epoch
        if former not in (0, received.epoch):
            self.version = 0
            self._fire(GatewayReplaced(former, received.epoch))

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.SEND_JOIN)
    def send_join(self, machine: MembershipMachine, event: Event) -> None:
        lost = dict(sorted(self.actor.lost))  # the last life of each
        fingerprint, told = self._fingerprint, tuple(lost.items())
        adapters, epoch = self.adapters()
        join = Join(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            info=self._info,
            was_member=machine.was_welcomed,
            lost=told,
            adapters=adapters,
            adapters_of=epoch,
        )
        self.actor.send(self._gateway, join)

    @performs(Do.ARM_JOIN)
    def arm_join(self, machine: MembershipMachine, event: Event) -> None:
        self.arm(machine, self._timing.retry_interval_s, JoinDue())

    @performs(Do.TAKE_TIME)
    def take_time(self, machine: MembershipMachine, event: Heard) -> None:
        """Late by the message's own way.  The last one counts: machines may sleep, and their clocks
        with them."""
        self.actor.cluster_offset_s = event.cluster_s - self.clock.now_s()

    @performs(Do.ARM_SILENCE)
    def arm_silence(self, machine: MembershipMachine, event: Event) -> None:
        self.arm(machine, self._timing.lost_after_s, GatewayFellSilent())

    @performs(Do.BEAT)
    def beat(self, machine: MembershipMachine, event: Event) -> None:
        self._beat()

    def _beat(self) -> None:
        left_s = max(0.0, self.membership.drain_due_s - self.clock.now_s())
        beat = Heartbeat(
            load=self._load(),
            version=self.version,
            is_draining=self.membership.is_draining,
            drain_left_s=left_s,
            next_roles=self.membership.next_roles,
        )
        self.actor.send(self._gateway, beat)
        self.actor.timers.call_later(self.membership.beat_s, self._beat)

    @performs(Do.DOUBT)
    def doubt(self, machine: MembershipMachine, event: Event) -> None:
        self.actor.doubt(self._gateway)

    @performs(Do.NOTE_FORMER_LOST)
    def note_former_lost(self, machine: MembershipMachine, event: GatewayReplaced) -> None:
        """Nobody reads its requests any more."""
        self._note_lost(Address(self._gateway.instance_id, event.former_epoch, ""))

    @performs(Do.TELL_SERVING)
    def tell_serving(self, machine: MembershipMachine, event: Event) -> None:
        self.on_welcome()

    @performs(Do.ARM_ABSENT)
    def arm_absent(self, machine: MembershipMachine, event: Event) -> None:
        self.arm(machine, absent_after_s(self._timing), AbsenceSettled())

    @performs(Do.FORGET_ABSENT)
    def forget_absent(self, machine: MembershipMachine, event: Event) -> None:
        """A registry that starts anew has had time for the joins of all living instances."""
        self.actor.listed = set(self._listed)

    @performs(Do.LET_GO)
    def let_go(self, machine: MembershipMachine, event: Event) -> None:
        for component in self.actor.components:
            component.drained()

    @performs(Do.ARM_DRAIN)
    def arm_drain(self, machine: MembershipMachine, event: DrainRequested) -> None:
        left_s = event.due_s - self.clock.now_s()
        self.arm(machine, left_s, DrainTimedOut())
        self.arm(machine, left_s + self._timing.move_timeout_s, MoveTimedOut())

    @performs(Do.SEND_LEAVE)
    def send_leave(self, machine: MembershipMachine, event: Event) -> None:
        self.actor.send(self._gateway, Leave())

    @performs(Do.LOOK_FOR_HOLDER)
    def look_for_holder(self, machine: MembershipMachine, event: NameTaken) -> None:
        address = event.holder.address
        if self.is_gone(event.holder):
            self.actor.lost.add((address.instance_id, address.epoch))
            self.post(self.membership, HolderGone())

    @performs(Do.TELL_WAITING)
    def tell_waiting(self, machine: MembershipMachine, event: NameTaken) -> None:
        self.on_waiting(event.holder)

    @performs(Do.REJECT)
    def reject(self, machine: MembershipMachine, event: Refused) -> None:
        self.on_rejected(event.reason)

    @performs(Do.EXPEL)
    def expel(self, machine: MembershipMachine, event: Refused) -> None:
        self.on_expelled(event.reason)

    def ended(self, machine: MembershipMachine) -> None:
        self.actor.timers.cancel_call(self._beat)

    # --- peers ------------------------------------------------------------------------------------

    @receives(Membership)
    def on_membership(self, received: Received) -> None:
        message: Membership = received.message
        if not self._hears(received) or message.version <= self.version:
            return
        if received.epoch != self._registry_epoch:
            self._registry_epoch, self._listed = received.epoch, set()
            self._fire(RegistryBegan())
        self.version = message.version
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
        self.on_list(message.instances)
        if present & self.actor.lost:
            self._fire(LostOneListed())

    def _log_transport(self, info: InstanceInfo) -> None:
        is_self = self.actor.is_self(info.address)
        if not is_self and pairing.exchange(self._info, info):
            name, peer = pairing.choose(self._info, info), info.address.instance_id
            if reason := pairing.fallback(self._info, info):
                log = self.actor.log
                log.warning("rows and KV move over", transport=name, peer=peer, reason=reason)
            else:
                self.actor.log.info("rows and KV move over", transport=name, peer=peer)

    def _note_lost(self, address: Address) -> None:
        key = (address.instance_id, address.epoch)
        if key in self.actor.lost:
            return
        self.actor.lost.add(key)
        for component in self.actor.components:
            component.peer_lost(address)

    def _note_replaced(self, address: Address) -> None:
        """Earlier lives of this peer are over, also those that this registry never knew: the
        instance may have restarted while there was no gateway."""
        for name, epoch in list(self.actor.peers):
            if name == address.instance_id and epoch < address.epoch:
                self._note_lost(self.actor.peers[name, epoch].address)

    def _forget_old(self, present: set[tuple[str, int]]) -> None:
        """Peers that are neither present nor lost left in order; lost ones stay for fencing.

        Only a life that this very registry has listed can have left it.  A gateway that starts
        anew lists instances as they join: one that has not joined it yet is alive.
        """
        for key in sorted(self._listed):
            if key not in present and key not in self.actor.lost:
                self._note_lost(self.actor.peers[key].address)
