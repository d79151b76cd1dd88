"""Membership of an instance: MEMBERSHIP's effects, and its copy of each gateway's registry.

Theory of operation
-------------------
A gateway owns its registry (fault F35). Here only the latest copy is kept: peers to connect to, and
lost epochs, which every role gets to fence them.

Several gateways may have the same instances, without a message from one to another. An instance
joins each of them (`GatewayPlace`). For each it has a MEMBERSHIP, the gateway's time and a copy of
the registry. All that belongs to a request goes to the gateway of that request. A life is of all of
them.

- One that any registry declares lost is over at all. A peer fences it, and brings its loss to the
  other gateways with its next join there, by which it asks for the registry. The life itself ends
  with the first refusal, and the next one joins everywhere.
- A peer is a member while any registry lists it whose gateway speaks. So nobody is taken for gone
  because one gateway has begun anew with an empty registry.
- It drains and leaves at all gateways at once.

While no gateway speaks, all goes on as with a single one. Once one does, memory of the others'
requests is given back (FORSAKEN).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd.config import Timing
from epd.fsm.kernel import Event
from epd.fsm.membership import (
    AbsenceSettled,
    Acknowledged,
    DeclaredLost,
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
    MoveTimedOut,
    NameTaken,
    NewsMissed,
    OtherHeard,
    Refused,
    Welcomed,
)
from epd.fsm.membership import Membership as MembershipMachine
from epd.messages import (
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
    Welcome,
)
from epd.roles.base import Actor, performs, receives
from epd.roles.place import GatewayPlace, GatewayPlaces
from epd.transport.base import Received


def absent_after_s(timing: Timing) -> float:
    """How long after a registry's start those who knew a member still take it for living.  All who
    live have joined by then: they miss the former registry after `lost_after_s`.  Who comes later
    may have been fenced, and is refused."""
    return 3 * timing.lost_after_s


class Member(GatewayPlaces):
    """One instance's side of the registries."""

    def __init__(
        self,
        actor: Actor,
        gateways: Sequence[Address],
        info: InstanceInfo,
        fingerprint: str,
        timing: Timing,
        load: Callable[[], Load],
    ) -> None:
        super().__init__(actor, gateways, info)
        self._fingerprint = fingerprint
        self._timing = timing
        self._load = load
        self.on_rejected: Callable[[str], None] = lambda reason: None
        self.on_expelled: Callable[[str], None] = lambda reason: None
        self.on_welcome: Callable[[], None] = lambda: None
        self.on_drain_asked: Callable[[bool, tuple[str, ...]], None] = lambda restarts, roles: None
        self.on_waiting: Callable[[InstanceInfo], None] = lambda holder: None
        self.adapters: Callable[[], tuple[AdapterList | None, int]] = lambda: (None, 0)
        """The last list of them, and the epoch of the gateway that sent it."""
        self.is_gone: Callable[[InstanceInfo], bool] = lambda other: False
        """Whether that process of this host has ended, by the host's kernel."""

    @property
    def is_over(self) -> bool:
        """Whether it has no place at any gateway, and asks for none."""
        return all(machine.terminal for machine in self._places)

    def start(self) -> None:
        for place in self.places:
            self._begin(place)

    def _begin(self, place: GatewayPlace) -> None:
        self.actor.connect(place.address)
        self.post(place.machine, JoinDue())

    def join(self, gateways: Sequence[Address]) -> None:
        """These are its gateways now; one that is none any more is left when it is silent."""
        wanted = {one.endpoint: one for one in gateways}
        for place in self.places:
            place.is_wanted = wanted.pop(place.address.endpoint, None) is not None
            if not (place.is_wanted or place.machine.is_heard):
                self._forsake(place)
                self.post(place.machine, LeaveRequested())
        for gateway in wanted.values():
            self._begin(self._add(gateway))

    def drain(self, within_s: float | None = None, roles: tuple[str, ...] = ()) -> None:
        """Take no new work; call `leave` when nothing is open.  `within_s`: its bound, if not that
        of the settings; whoever drains already keeps the first.  `roles`: of the next life."""
        within_s = self._timing.drain_timeout_s if within_s is None else within_s
        self._post_all(DrainRequested(self.clock.now_s() + within_s, roles))

    def leave(self) -> None:
        self._post_all(LeaveRequested())

    def _post_all(self, event: Event) -> None:
        for place in self.places:
            self.post(place.machine, event)

    # --- a gateway's messages ---------------------------------------------------------------------

    def _answers(self, received: Received) -> bool:
        """A join of this very life, and not as a former life of the gateway."""
        is_own = received.message.epoch == self._info.address.epoch
        return is_own and not self.actor.is_former(received)

    @receives(Welcome)
    def on_welcomed(self, received: Received) -> None:
        message: Welcome = received.message
        if not self._answers(received):
            return
        place = self._at(received)
        self._follow(place, received.epoch)
        if not place.machine.was_welcomed and (reason := self._far_off(message.wall_s)):
            self.fire(place.machine, Refused(reason))
            return
        beat_s = message.heartbeat_interval_s
        self.fire(place.machine, Welcomed(message.cluster_s, beat_s, received.epoch))

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
        if self._answers(received):
            refused = DeclaredLost if message.is_over else Refused
            self.fire(self._at(received).machine, refused(message.reason))

    @receives(JoinDeferred)
    def on_deferred(self, received: Received) -> None:
        message: JoinDeferred = received.message
        if self._answers(received):
            self.fire(self._at(received).machine, NameTaken(message.holder))

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
        place = self._at(received)
        if not message.known:
            self.fire(place.machine, Forgotten(message.cluster_s))
        elif place.version < message.version:
            self.fire(place.machine, NewsMissed(message.cluster_s))
        else:
            self.fire(place.machine, Acknowledged(message.cluster_s))

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.SEND_JOIN)
    def send_join(self, machine: MembershipMachine, event: Event) -> None:
        lost = dict(sorted(self.actor.lost))  # the last life of each
        fingerprint, told = self._fingerprint, tuple(lost.items())
        adapters, epoch = self.adapters()
        gateway = self._places[machine].address
        join = Join(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            info=self._info.but(dialled=gateway.endpoint),
            was_member=self._may_be_given_up(machine),
            lost=told,
            adapters=adapters,
            adapters_of=epoch,
        )
        self.actor.send(gateway, join)

    def _may_be_given_up(self, machine: MembershipMachine) -> bool:
        """Whether it was a member, and may be none for its peers by now: no other gateway that
        speaks has it."""
        was_member = self._has_left or any(one.was_welcomed for one in self._places)
        return was_member and not self._others_speak(machine)

    def _others_speak(self, machine: MembershipMachine) -> bool:
        return any(other.is_heard for other in self._places if other is not machine)

    @performs(Do.ARM_JOIN)
    def arm_join(self, machine: MembershipMachine, event: Event) -> None:
        """A gateway that was asked in vain beside one that speaks is forsaken: a process that stood
        still asks both first."""

        def ask_again() -> None:
            if self._others_speak(machine):
                self.fire(machine, OtherHeard())
            self.fire(machine, JoinDue())

        self.actor.timers.arm(machine, JoinDue, self._timing.retry_interval_s, ask_again)

    @performs(Do.TAKE_TIME)
    def take_time(self, machine: MembershipMachine, event: Heard) -> None:
        """Late by the message's own way.  The last one counts: machines may sleep, and their clocks
        with them."""
        offset_s = self.actor.cluster_offset_s = event.cluster_s - self.clock.now_s()
        self.actor.offsets[self._places[machine].name] = offset_s

    @performs(Do.ARM_SILENCE)
    def arm_silence(self, machine: MembershipMachine, event: Event) -> None:
        self.arm(machine, self._timing.lost_after_s, GatewayFellSilent())

    @performs(Do.BEAT)
    def beat(self, machine: MembershipMachine, event: Event) -> None:
        self._beat()

    def _beat(self) -> None:
        """To each gateway that has welcomed it, as often as the most eager one asks for."""
        load = self._load().but(num_gateways=len(self._places))
        machines = self.actor.known_by()
        for machine in machines.values():
            left_s = max(0.0, machine.drain_due_s - self.clock.now_s())
            place = self._places[machine]
            beat = Heartbeat(
                load=load,
                version=place.version,
                is_draining=machine.is_draining,
                drain_left_s=left_s,
                next_roles=machine.next_roles,
            )
            self.actor.send(place.address, beat)
        if machines:
            next_s = min(machine.beat_s for machine in machines.values())
            self.actor.timers.call_later(next_s, self._beat)

    @performs(Do.DOUBT)
    def doubt(self, machine: MembershipMachine, event: Event) -> None:
        self.actor.doubt(self._places[machine].address)

    @performs(Do.NOTE_FORMER_LOST)
    def note_former_lost(self, machine: MembershipMachine, event: GatewayReplaced) -> None:
        """Nobody reads its requests any more."""
        self._note_lost(self._places[machine].life(event.former_epoch))

    @performs(Do.FORSAKE)
    def forsake(self, machine: MembershipMachine, event: Event) -> None:
        self._forsake(self._places[machine])

    def _forsake(self, place: GatewayPlace) -> None:
        place.forsake()
        self._count_listed()
        for component in self.actor.components:
            component.peer_lost(place.life(place.machine.gateway_epoch))

    @performs(Do.TELL_SERVING)
    def tell_serving(self, machine: MembershipMachine, event: Event) -> None:
        self.on_welcome()

    @performs(Do.ARM_ABSENT)
    def arm_absent(self, machine: MembershipMachine, event: Event) -> None:
        self.arm(machine, absent_after_s(self._timing), AbsenceSettled())

    @performs(Do.FORGET_ABSENT)
    def forget_absent(self, machine: MembershipMachine, event: Event) -> None:
        """A registry that starts anew has had time for the joins of all living instances."""
        place = self._places[machine]
        place.counted = set(place.listed)
        self._count_listed()

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
        self.actor.send(self._places[machine].address, Leave())

    @performs(Do.LOOK_FOR_HOLDER)
    def look_for_holder(self, machine: MembershipMachine, event: NameTaken) -> None:
        address = event.holder.address
        if self.is_gone(event.holder):
            self.actor.lost.add((address.instance_id, address.epoch))
            self.post(machine, HolderGone())

    @performs(Do.TELL_WAITING)
    def tell_waiting(self, machine: MembershipMachine, event: NameTaken) -> None:
        self.on_waiting(event.holder)

    @performs(Do.REJECT)
    def reject(self, machine: MembershipMachine, event: Refused) -> None:
        """It does not fit, where no gateway takes it; a single one may not fit the others."""
        if self.is_over:
            self.on_rejected(event.reason)
        else:
            at = self._places[machine].address.endpoint
            self.actor.log.warning("a gateway refuses it", gateway=at, reason=event.reason)

    @performs(Do.EXPEL)
    def expel(self, machine: MembershipMachine, event: Refused | DeclaredLost) -> None:
        self.on_expelled(event.reason)

    def ended(self, machine: MembershipMachine) -> None:
        if not self.actor.known_by():
            self.actor.timers.cancel_call(self._beat)
        place = self._places.get(machine)
        if place is not None and not place.is_wanted:
            self._has_left |= machine.was_welcomed
            del self._places[machine], self.actor.memberships[place.name]
            self.actor.offsets.pop(place.name, None)
            self.actor.disconnect(place.name)
