"""The registry counts one life of an instance: when a later one is a member, the earlier is over.

Two would get work, and the dead one's would be given up only when its silence has lasted long
enough (F44).  Nor is a living one given up, by the registry or by a peer's report to a new gateway
(F35): it would have to start anew.  No stranger displaces one that lives, and none waits for ever
under the name of another (F78).  Once all is quiet, every instance has the members, and no more:
messages for others go nowhere.
"""

from __future__ import annotations

from epd.fsm import instance
from epd.fsm.kernel import Event, Machine, State
from epd.messages import Address
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Lives(Checker):
    name = "lives"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._members: dict[tuple[str, str], instance.Instance] = {}  # by gateway and name
        self._first: dict[str, int] = {}  # epoch by name
        context.world.watch(self._watch, instance.JoinAccepted)
        context.world.watch(self._replaced, instance.EpochReplaced)
        if context.all_stay:
            context.world.watch(self._given_up, instance.HeartbeatsEnded)

    def _given_up(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if target is instance.S.LOST:
            self.violate(f"{machine.key} was given up, and lives")

    def _replaced(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        node = self.context.cluster.nodes.get(machine.key)
        if target is instance.S.LOST and node is not None and node.process.alive:
            self.violate(f"{machine.key} lives, and was taken for replaced (F78)")

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, instance.Instance):
            return
        name = process.name, machine.info.address.instance_id
        first = self._first.setdefault(machine.info.address.instance_id, machine.info.address.epoch)
        if self.context.instances_stay and machine.info.address.epoch != first:
            self.violate(f"{machine.key} joins, though its first life was never disturbed")
        earlier = self._members.get(name)
        if earlier is not None and earlier is not machine and earlier.present:
            self.violate(f"{earlier.key} and {machine.key} are members at once (F44)")
        self._members[name] = machine

    def at_end(self) -> None:
        living = self.context.cluster.living()
        for node in self.context.cluster.nodes.values():
            process = node.process
            if process.alive and node not in living:
                self.violate(f"{process.name} lives on, and another has its name (F78)")
        for gateway in (node.gateway for node in living if node.gateway is not None):
            present = (i.info.address for i in gateway.registry.instances if i.present)
            members = {(address.instance_id, address.epoch) for address in present}
            for node in living:
                actor = node.actor
                known = {life for life in actor.listed if actor.is_listed(Address(*life, ""))}
                if node.instance is not None and known != members:
                    self.violate(
                        f"{node.process.name} takes {sorted(known)} for the members "
                        f"{sorted(members)} of {gateway.actor.address.instance_id}"
                    )
