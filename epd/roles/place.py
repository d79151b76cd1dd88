"""What an instance has of each gateway: its MEMBERSHIP there, and its copy of that registry.

The name of a gateway comes with its first answer, which names the endpoint that was dialled. Until
then a label stands for it. Where another gateway answers at an endpoint, it follows the former one.

From the copies the roles get peers to connect to, and lost epochs to fence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from epd.fsm.membership import (
    GatewayReplaced,
    LostOneListed,
    RegistryBegan,
)
from epd.fsm.membership import Membership as MembershipMachine
from epd.messages import (
    OF_GATEWAY,
    Address,
    InstanceInfo,
    JoinDeferred,
    JoinRefused,
    Membership,
    Welcome,
)
from epd.roles.base import Actor, Component, receives
from epd.scheduling import pairing
from epd.transport.base import Received

Lives = set[tuple[str, int]]
ANSWERS = frozenset((Welcome, JoinDeferred, JoinRefused))  # to a join


@dataclass(slots=True, eq=False)
class GatewayPlace:
    """At one gateway."""

    address: Address
    machine: MembershipMachine
    is_wanted: bool = True  # by who chooses the gateways
    version: int = 0  # of the list that it has
    registry_epoch: int = 0  # whose registry `listed` is of
    listed: Lives = field(default_factory=set)
    counted: Lives = field(default_factory=set)  # by registries of it, and missed by none since

    @property
    def name(self) -> str:
        return self.address.instance_id

    def life(self, epoch: int) -> Address:
        return Address(self.name, epoch, "")

    def lists(self, life: tuple[str, int]) -> bool:
        return life in self.listed

    def forsake(self) -> None:
        """What it lists may be of long ago; its list is to be taken anew when it returns."""
        self.version = 0
        self.counted.clear()


class GatewayPlaces(Component[MembershipMachine]):
    """At all gateways; and what follows from their lists."""

    fires = MembershipMachine

    def __init__(self, actor: Actor, gateways: Sequence[Address], info: InstanceInfo) -> None:
        super().__init__(actor)
        self._info = info
        self._places: dict[MembershipMachine, GatewayPlace] = {}
        self._has_left = False  # a gateway that had welcomed it
        self.on_list: Callable[[Sequence[InstanceInfo]], None] = lambda members: None
        actor.admits = self._admits
        for gateway in gateways:
            self._add(gateway)

    @property
    def places(self) -> tuple[GatewayPlace, ...]:
        return tuple(self._places.values())

    def _add(self, gateway: Address) -> GatewayPlace:
        own = self._info.address
        key = f"{own.instance_id}:{own.epoch}" + f"@{gateway.instance_id}" * bool(self._places)
        machine = MembershipMachine(key, self.actor.journal)
        place = self._places[machine] = GatewayPlace(gateway, machine)
        self.actor.memberships[gateway.instance_id] = machine
        return place

    def _admits(self, received: Received) -> bool:
        """Messages of a gateway; of a life that a registry has listed, all but the gateway's own
        kinds.  An instance may send before its listing is here: that is repeated, as if lost."""
        if received.source in self.actor.memberships:
            return True
        if type(received.message) in ANSWERS:
            return self._meet(received)
        is_told_of = (received.source, received.epoch) in self.actor.peers
        return is_told_of and type(received.message) not in OF_GATEWAY

    def _meet(self, received: Received) -> bool:
        """Whether a gateway with a new name answers at an endpoint that was dialled."""
        dialled = received.message.dialled
        place = next((one for one in self.places if one.address.endpoint == dialled), None)
        if place is None:
            return False
        self._follow(place, received.epoch)
        memberships, former = self.actor.memberships, place.name
        place.address = place.address.but(instance_id=received.source)
        memberships[received.source] = memberships.pop(former)
        self.actor.disconnect(former)
        self.actor.connect(place.address)
        return True

    def _at(self, received: Received) -> GatewayPlace:
        return self._places[self.actor.memberships[received.source]]

    def _hears(self, received: Received) -> bool:
        """Whoever speaks is followed, and from then on its former lives are over, whatever of them
        comes late.  Before the welcome nobody is: no clock would end that, if it fell silent."""
        if not self.actor.knows_time_of(received.source) or self.actor.is_former(received):
            return False
        self._follow(self._at(received), received.epoch)
        return True

    def _follow(self, place: GatewayPlace, epoch: int) -> None:
        """Of a new gateway: it counts anew."""
        former = place.machine.gateway_epoch
        if former not in (0, epoch):
            place.version = 0
            self.fire(place.machine, GatewayReplaced(former, epoch))

    # --- peers ------------------------------------------------------------------------------------

    @receives(Membership)
    def on_membership(self, received: Received) -> None:
        message: Membership = received.message
        if not self._hears(received):
            return
        place = self._at(received)
        present = {(i.address.instance_id, i.address.epoch) for i in message.instances}
        if message.version > place.version:
            self._take_list(place, received, present)
        if present & self.actor.lost:  # maybe since it was asked, whose answer this is
            self.fire(place.machine, LostOneListed())

    def _take_list(self, place: GatewayPlace, received: Received, present: Lives) -> None:
        message: Membership = received.message
        if received.epoch != place.registry_epoch:
            place.registry_epoch, place.listed = received.epoch, set()
            self.fire(place.machine, RegistryBegan())
        place.version = message.version
        own = self._info.address.instance_id
        for info in message.instances:
            address = info.address
            key = (address.instance_id, address.epoch)
            if address.instance_id != own and key not in self.actor.peers:
                if self._is_outlived(address, place):
                    self._note_lost(address)
                else:
                    self.actor.connect(address)
                    self._note_replaced(address, place)
            if key not in self.actor.peers:
                self._log_transport(info)
            self.actor.peers[key] = info
        for address in message.lost:
            self._note_lost(address, place)
        self._forget_old(place, present)
        place.listed |= present
        place.counted |= present
        self._count_listed()
        self.on_list(message.instances)

    def _count_listed(self) -> None:
        self.actor.listed = set().union(*(place.counted for place in self._places.values()))

    def _is_outlived(self, address: Address, at: GatewayPlace) -> bool:
        """Whether another registry lists a later life of it."""
        others = (sorted(other.counted) for other in self.places if other is not at)
        return any(
            name == address.instance_id and epoch > address.epoch
            for name, epoch in chain.from_iterable(others)
        )

    def _log_transport(self, info: InstanceInfo) -> None:
        is_self = self.actor.is_self(info.address)
        if not is_self and pairing.exchange(self._info, info):
            name, peer = pairing.choose(self._info, info), info.address.instance_id
            if reason := pairing.fallback(self._info, info):
                log = self.actor.log
                log.warning("rows and KV move over", transport=name, peer=peer, reason=reason)
            else:
                self.actor.log.info("rows and KV move over", transport=name, peer=peer)

    def _note_lost(self, address: Address, at: GatewayPlace | None = None) -> None:
        """`at`: the place of the gateway that has it already."""
        key = (address.instance_id, address.epoch)
        if key in self.actor.lost:
            return
        self.actor.lost.add(key)
        for component in self.actor.components:
            component.peer_lost(address)
        for place in self.places:  # other gateways learn of it
            if place.lists(key) and place is not at:
                self.post(place.machine, LostOneListed())

    def _note_replaced(self, address: Address, at: GatewayPlace) -> None:
        """Earlier lives of this peer are over, also those that this registry never knew: the
        instance may have restarted while there was no gateway."""
        for name, epoch in list(self.actor.peers):
            if name == address.instance_id and epoch < address.epoch:
                self._note_lost(self.actor.peers[name, epoch].address, at)

    def _forget_old(self, place: GatewayPlace, present: Lives) -> None:
        """Peers that are neither present nor lost left in order; lost ones stay for fencing.

        Only a life that this very registry has listed can have left it.  A gateway that starts
        anew lists instances as they join: one that has not joined it yet is alive.
        """
        for key in sorted(place.listed):
            if key not in present and key not in self.actor.lost:
                self._note_lost(self.actor.peers[key].address, place)
