"""Adapters that come and go: one is offered when every instance with a language model holds it.

At the end each holds those that are offered, no more and no less.  So a load that failed was taken
back, an unload gave memory back, and an instance that joined late has the list.  Each load and
unload has its answer, unless the gateway died.  What was offered is, until it is unloaded: by a
new gateway, too.
"""

from __future__ import annotations

from epd.fsm import adapter
from epd.fsm.kernel import Event, Machine, State
from epd.roles.compose import Gateway
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.lives import Node


class Adapters(Checker):
    name = "adapters"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._kept: dict[str, None] = {}  # names that were offered, and that nobody has unloaded
        context.world.watch(self._offered, adapter.ListApplied)
        context.world.watch(self._unloaded, adapter.UnloadAsked)

    def _unloaded(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        self._kept.pop(machine.key, None)

    def _offered(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if source is target or target is not adapter.S.SERVING:
            return
        gateway = self.context.cluster.nodes[process.name].gateway
        assert gateway is not None
        assert isinstance(machine, adapter.LoadedAdapter)
        self._kept[machine.key] = None
        for node in self._members(gateway):
            if node.language is not None and machine.named.digest not in node.language.held:
                self.violate(f"{machine.key} is offered, and {node.process.name} does not hold it")

    def _members(self, gateway: Gateway) -> list[Node]:
        """Those that live."""
        nodes, instances = self.context.cluster.nodes, gateway.registry.instances
        found = [nodes.get(instance.key) for instance in instances if instance.present]
        return [node for node in found if node is not None and node.process.alive]

    def at_end(self) -> None:
        living = self.context.cluster.living()
        gateway = next((node.gateway for node in living if node.gateway is not None), None)
        if gateway is None or gateway.adapters is None:
            return
        offered = {named.digest for named in gateway.adapters.offered.values()}
        for name in self._kept:
            if name not in gateway.adapters.offered:
                self.violate(f"nobody has unloaded {name}, and it is offered no more")
        for node in self._members(gateway):
            spoiled = self.context.cluster.desk.spoils(node.process.instance_id)
            if node.language is not None and node.language.held != offered - spoiled:
                held = sorted(node.language.held)
                self.violate(f"{node.process.name} holds {held}, and offered are {sorted(offered)}")
        for call, process in self.context.cluster.desk.waiting.items():
            if process.alive:
                self.violate(f"{call} has no answer")
