"""The registry: INSTANCE machines, owned by the gateway alone (fault F35).

A join is checked before it counts.  Protocol version, model fingerprint, KV layout and row contract
must be those of the members, and a transport must lead to each peer of its rows and KV.  A mismatch
is refused with both values (fault F11).  Heartbeats keep an epoch alive; silence makes it suspect,
then lost.  Every change is published whole, with the lost epochs, so that peers connect and fence.

A stranger under the name of a member is answered on a line of its own, called as its life: the one
under the name stays the member's (F78).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from epd.config import Timing
from epd.fsm.instance import (
    Do,
    DrainAnnounced,
    GivenUp,
    HeartbeatMissed,
    HeartbeatReceived,
    HeartbeatsEnded,
    HolderBeat,
    Instance,
    JoinAccepted,
    JoinRejected,
    LeftReceived,
    NameContested,
    NameHeld,
)
from epd.fsm.kernel import Event
from epd.messages import (
    PROTOCOL_VERSION,
    Address,
    Heartbeat,
    HeartbeatAck,
    InstanceInfo,
    Join,
    JoinDeferred,
    JoinRefused,
    KvLayout,
    Leave,
    Load,
    Membership,
    Message,
    Welcome,
)
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.gateway.self_tests import SelfTests
from epd.roles.member import absent_after_s
from epd.scheduling import pairing
from epd.transport.base import Received

MAX_LOST = 256
MAX_GONE = 64  # names that are kept though nobody has them now
MAX_OUTSIDE = 32  # who wait for a name, and the last of those who were refused
ACKS_BEFORE_LOST = 4  # as many may be lost before an instance takes the gateway for gone


class Outsider(NamedTuple):
    """A life that asked for a place and has none."""

    info: InstanceInfo
    state: str
    since_s: float
    reason: str


class Registry(Component[Instance]):
    """All instances of one model behind one gateway."""

    fires = Instance

    def __init__(self, actor: Actor, fingerprint: str, timing: Timing) -> None:
        super().__init__(actor)
        self._fingerprint = fingerprint
        self._timing = timing
        self._instances: dict[str, Instance] = {}
        self._lost: deque[Address] = deque(maxlen=MAX_LOST)
        self._strangers: dict[tuple[str, int], Instance] = {}  # lives that wait for a name
        self._refused: deque[Outsider] = deque()
        self.version = 0  # of what is published
        self._started_s = actor.clock.now_s()
        self.on_lost: Callable[[Instance, bool], None] = lambda instance, fell_silent: None
        self.on_heard: Callable[[Address], None] = lambda address: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_overdue: Callable[[], None] = lambda: None
        self._acked_s: dict[str, float] = {}  # by name, when it was last told that it is known
        self.join_listeners: tuple[Callable[[Join], None], ...] = ()
        self.heartbeat_listeners: tuple[Callable[[Instance], None], ...] = ()
        self.extend(SelfTests(actor, self._of, self.fire))
        actor.admits = lambda received: (
            type(received.message) is Join or self._of(received) is not None
        )

    @property
    def instances(self) -> list[Instance]:
        """By name; of each the latest epoch, lost ones too until they return."""
        return [self._instances[name] for name in sorted(self._instances)]

    @property
    def outside(self) -> list[Outsider]:
        """Who asked for a place and has none: those who wait for a name, and the last refused."""
        waiting = self._strangers.values()
        return [
            *(Outsider(i.info, i.state.name, i.seen_s, i.reason) for i in waiting),
            *self._refused,
        ]

    def takers(self) -> list[Instance]:
        """Those that take work, by name."""
        return [instance for instance in self.instances if instance.takes_work]

    def has_known(self, role: str) -> bool:
        """Whether some instance has this role, or had it, as far as so young a registry shows."""
        return self._is_young() or any(role in i.info.roles for i in self._instances.values())

    def _is_young(self) -> bool:
        """Whether members of the registry before it may still join."""
        return self.clock.now_s() - self._started_s <= absent_after_s(self._timing)

    def transport_between(self, one: Address, other: Address) -> str:
        """`local` within an instance; empty if one of them is not registered any more."""
        if one.instance_id == other.instance_id:
            return "local"
        pair = [self._instances.get(address.instance_id) for address in (one, other)]
        if pair[0] is None or pair[1] is None:
            return ""
        return pairing.choose(pair[0].info, pair[1].info)

    # --- messages ---------------------------------------------------------------------------------

    @receives(Join)
    def on_join(self, received: Received) -> None:
        message: Join = received.message
        info = message.info
        address = info.address
        if (address.instance_id, address.epoch) != (received.source, received.epoch):
            self.actor.counters["join_of_another"] += 1
            return
        for life in message.lost if self._is_ours(message) else ():
            self._give_up(*life)
        known = self._instances.get(address.instance_id)
        if known is not None and known.info.address.epoch == address.epoch:
            self._join_again(known)
            return
        is_over = (address.instance_id, address.epoch) in self.actor.lost
        if known is not None and not is_over:
            self.fire(known, known.asked_for(info))
            if known.present:
                return
        if (message.was_member and not self._is_young()) or is_over:
            self._refuse(info, "its peers have given this epoch up; its next life may join", True)
            return
        self._admit(message)

    def _join_again(self, known: Instance) -> None:
        if known.terminal:
            self._refuse(known.info, "this epoch was declared lost; its next life may join", True)
        else:
            self.actor.connect(known.info.address)
            self.fire(known, JoinAccepted(self.clock.now_s()))

    def _admit(self, message: Join) -> None:
        """Under a name that nobody has, if it fits the others."""
        info, address = message.info, message.info.address
        instance = self._strangers.pop((address.instance_id, address.epoch), None)
        if instance is not None:
            self.actor.bus.disconnect(_aside(address))
        else:
            instance = self._instance(info)
        self.actor.connect(address)
        if reason := self._mismatch(message):
            self.fire(instance, JoinRejected(reason))
            return
        self._forget(address.instance_id)
        self._instances[address.instance_id] = instance
        for joined in self.join_listeners:
            joined(message)
        self.fire(instance, JoinAccepted(self.clock.now_s()))

    def _is_ours(self, join: Join) -> bool:
        """Whether its protocol and model are ours; if not, the lives it lists as lost stay."""
        said = (join.protocol_version, join.model_fingerprint)
        return said == (PROTOCOL_VERSION, self._fingerprint)

    def _instance(self, info: InstanceInfo) -> Instance:
        return Instance(info, Load(), self.clock.now_s(), self.actor.journal)

    def _forget(self, name: str) -> None:
        """Drop refusals of this name, and the oldest names whose instance is gone."""
        self._refused = deque(one for one in self._refused if one.info.address.instance_id != name)
        gone = [known for known, one in self._instances.items() if one.terminal]
        for oldest in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._instances[oldest]
            self._acked_s.pop(oldest, None)

    def _give_up(self, name: str, epoch: int) -> None:
        """A peer has it from an earlier registry that this life is over, and may have fenced it,
        which bars it for good: the instance joins with its next epoch."""
        known = self._instances.get(name)
        if known is not None and known.info.address.epoch == epoch:
            self.fire(known, GivenUp())
        else:
            self.actor.lost.add((name, epoch))

    def _mismatch(self, join: Join) -> str:
        if (said := join.protocol_version) != PROTOCOL_VERSION:
            return f"protocol versions differ: gateway {PROTOCOL_VERSION}, it {said}"
        if join.model_fingerprint != self._fingerprint:
            return f"models differ: gateway {self._fingerprint}, it {join.model_fingerprint}"
        for other in self.instances:
            if not other.present:
                continue
            for name in ("kv_layout", "row_contract"):
                own, its = getattr(other.info, name), getattr(join.info, name)
                if isinstance(own, KvLayout) and isinstance(its, KvLayout):
                    own, its = own.whole, its.whole  # KV is sliced by heads on its way
                if own is not None and its is not None and own != its:
                    return f"{name} differs: {other.info.address.instance_id} {own}, it {its}"
            if reason := pairing.objection(other.info, join.info):
                return reason
        return ""

    @receives(Heartbeat)
    def on_heartbeat(self, received: Received) -> None:
        instance = self._of(received)
        if instance is None or not instance.present:
            if instance is not None:
                self.on_heard(instance.info.address)
            self._acknowledge(received.source, known=False)
            return
        message: Heartbeat = received.message
        self.fire(instance, HeartbeatReceived(message.load, message.version, self.clock.now_s()))
        if message.is_draining:
            self.fire(instance, DrainAnnounced(message.drain_left_s, message.next_roles))
        for heard in self.heartbeat_listeners:
            heard(instance)
        due_s = self._acked_s[received.source] + self._timing.lost_after_s / ACKS_BEFORE_LOST
        if instance.seen_s >= due_s or message.version != self.version:
            self._acked_s[received.source] = instance.seen_s
            self._acknowledge(received.source, known=True)

    def _acknowledge(self, name: str, *, known: bool) -> None:
        self.actor.send(
            name, HeartbeatAck(known=known, version=self.version, cluster_s=self.actor.cluster_s())
        )

    @receives(Leave)
    def on_leave(self, received: Received) -> None:
        if (instance := self._of(received)) is not None:
            self.fire(instance, LeftReceived())

    def is_silent(self, instance_id: str, epoch: int) -> bool:
        """Whether this life of an instance is a member without heartbeats for a while."""
        is_member = self.is_present(instance_id, epoch)
        return is_member and not self._instances[instance_id].is_heard

    def is_present(self, instance_id: str, epoch: int) -> bool:
        """Whether this life of an instance is a member."""
        instance = self._instances.get(instance_id)
        return instance is not None and instance.present and instance.info.address.epoch == epoch

    def _of(self, received: Received) -> Instance | None:
        instance = self._instances.get(received.source)
        if instance is None or instance.info.address.epoch != received.epoch:
            return None
        return instance

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.WATCH)
    def watch(self, instance: Instance, event: Event) -> None:
        self.arm(instance, self._timing.suspect_after_s, HeartbeatMissed())
        self.arm(instance, self._timing.lost_after_s, HeartbeatsEnded())

    @performs(Do.WATCH_ON)
    def watch_on(self, instance: Instance, event: Event) -> None:
        """What is left begins now: a gateway that stood still, or whose machine slept, has not
        listened meanwhile."""
        left_s = self._timing.lost_after_s - self._timing.suspect_after_s
        self.arm(instance, left_s, HeartbeatsEnded())

    @performs(Do.WELCOME)
    def welcome(self, instance: Instance, event: Event) -> None:
        address = instance.info.address
        self._acked_s[address.instance_id] = self.clock.now_s()
        beat_s, of, at = self._timing.heartbeat_interval_s, address.epoch, instance.info.dialled
        clocks = {"cluster_s": self.actor.cluster_s(), "wall_s": self.clock.wall_s()}
        told = Welcome(epoch=of, heartbeat_interval_s=beat_s, dialled=at, **clocks)
        self.actor.send(address, told)
        self.actor.send(address, self._membership())

    # --- equal names ------------------------------------------------------------------------------

    @performs(Do.HOLD_OFF)
    def hold_off(self, holder: Instance, event: NameContested) -> None:
        address = event.info.address
        life = address.instance_id, address.epoch
        if life not in self._strangers:
            if len(self._strangers) >= MAX_OUTSIDE:
                self.actor.counters["join_not_heard"] += 1
                return  # it asks again
            self._strangers[life] = self._instance(event.info)
        self.post(self._strangers[life], NameHeld(self.version, holder.info, self.clock.now_s()))

    @performs(Do.TELL_HELD)
    def tell_held(self, stranger: Instance, event: NameHeld) -> None:
        its = stranger.info
        epoch, at = its.address.epoch, its.dialled
        self._answer(its, JoinDeferred(epoch=epoch, holder=event.holder, dialled=at))

    @performs(Do.WATCH_JOINS)
    def watch_joins(self, stranger: Instance, event: Event) -> None:
        self.arm(stranger, self._timing.lost_after_s, HeartbeatsEnded())

    @performs(Do.SHOW_ALIVE)
    def show_alive(self, holder: Instance, event: HeartbeatReceived) -> None:
        for (name, _), stranger in self._strangers.items():
            if name == holder.info.address.instance_id:
                self.post(stranger, HolderBeat(event.version, holder.info))

    @performs(Do.REFUSE)
    def refuse(self, instance: Instance, event: Event) -> None:
        self._refuse(instance.info, instance.reason)

    def _refuse(self, info: InstanceInfo, reason: str, is_over: bool = False) -> None:
        name, epoch = info.address.instance_id, info.address.epoch
        if all(one.info.address != info.address for one in self._refused):
            self._refused.append(Outsider(info, "REFUSED", self.clock.now_s(), reason))
            if len(self._refused) > MAX_OUTSIDE:
                self._turn_away(self._refused.popleft().info.address)  # it has its answer by now
            self.actor.counters["joins_refused"] += 1
            self.actor.log.warning("join refused", instance=name, epoch=epoch, reason=reason)
        at = info.dialled
        self._answer(info, JoinRefused(epoch=epoch, reason=reason, dialled=at, is_over=is_over))

    def _turn_away(self, address: Address) -> None:
        self.actor.bus.disconnect(_aside(address))
        if address.instance_id not in self._instances:
            self.actor.disconnect(address.instance_id)

    def _answer(self, info: InstanceInfo, message: Message) -> None:
        address = info.address
        known = self._instances.get(address.instance_id)
        if known is not None and known.present and known.info.address.epoch != address.epoch:
            address = Address(_aside(address), address.epoch, address.endpoint, address.public_key)
            self.actor.bus.connect(address)
        else:
            self.actor.connect(address)
        self.actor.send(address, message)

    @performs(Do.PUBLISH)
    def publish(self, instance: Instance, event: Event) -> None:
        self.version += 1
        membership = self._membership()
        for other in self.instances:
            if other.present:
                self.actor.send(other.info.address, membership)
        self.on_change()

    def _membership(self) -> Membership:
        present = tuple(i.info for i in self.instances if i.present)
        return Membership(version=self.version, instances=present, lost=tuple(self._lost))

    @performs(Do.FAIL_ATTEMPTS)
    def fail_attempts(self, instance: Instance, event: Event) -> None:
        address = instance.info.address
        self._lost.append(address)
        self.actor.lost.add((address.instance_id, address.epoch))
        self.actor.counters[f"instances_{instance.state.name.lower()}"] += 1
        said = self.actor.log.warning if instance.was_lost else self.actor.log.info
        how, why = instance.state.name, instance.reason
        said("instance is gone", instance=instance.key, how=how, why=why)
        for component in self.actor.components:
            component.peer_lost(address)
        self.on_lost(instance, isinstance(event, HeartbeatsEnded))

    @performs(Do.MOVE_ATTEMPTS)
    def move_attempts(self, instance: Instance, event: Event) -> None:
        self.on_overdue()

    @performs(Do.DISCONNECT)
    def disconnect(self, instance: Instance, event: Event) -> None:
        name = instance.info.address.instance_id
        is_aside = self._instances.get(name) is not instance
        self.actor.bus.disconnect(instance.key if is_aside else name)

    def ended(self, instance: Instance) -> None:
        """Of strangers: a refused one may ask again, and waits anew."""
        address = instance.info.address
        self._strangers.pop((address.instance_id, address.epoch), None)


def _aside(address: Address) -> str:
    """The name of a line to a life whose name is another's; no instance can be called so."""
    return f"{address.instance_id}:{address.epoch}"
