"""Who stands still gets no work, ends in time, and nobody else is taken for such a one (F87).

Looked at with each heartbeat that a gateway gets.  The checker reads at the device itself whether
it hangs; the time counts from the first such look, while both processes run.  A wait that no
measurement bounds yet passes.
"""

from __future__ import annotations

from epd.fsm import generation, instance
from epd.fsm.kernel import Event, Machine, State
from epd.roles.health import ENDS, PATIENCE
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.lives import Node
from epd_lab.sim.wedges import wedged


class Wedges(Checker):
    name = "wedges"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        timing = context.cluster.settings.timing
        beats_s = 2 * timing.heartbeat_interval_s
        self._seen_after_s = timing.lost_after_s + PATIENCE * timing.suspect_after_s + beats_s
        self._ends_after_s = timing.stall_timeout_s
        self._beats_s = beats_s
        self._hung: dict[str, tuple[str, float]] = {}  # by life: what, and when it was first seen
        context.world.watch(self._heard, instance.HeartbeatReceived)
        context.world.watch(self._placed, generation.Placed)

    def _heard(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(machine, instance.Instance)
        node = self.context.cluster.nodes.get(machine.key)
        if node is None or target not in instance._SERVES:
            return
        waits, now_s = machine.load.waits, self.world.loop.now_s
        what, allowed_s = self._stands(node)
        if not what:
            self._hung.pop(machine.key, None)
        else:
            if self._hung.get(machine.key, ("", 0.0))[0] != what:  # another part of it
                self._hung[machine.key] = what, now_s
            hung_s = now_s - self._hung[machine.key][1]
            is_unmeasured = any(wait.bound_s > hung_s for wait in waits)
            have_run = self._have_run(allowed_s, process, node.process)
            is_late = hung_s > allowed_s and have_run and not is_unmeasured
            if target is instance.S.HEALTHY and is_late:
                self.violate(f"{machine.key} is {target.name}, and stands still: {hung_s:.2f} s")
        for wait in waits:
            ends_s = max(ENDS * wait.bound_s, self._ends_after_s) + self._beats_s
            if wait.for_s > ends_s and self._have_run(wait.for_s, process, node.process):
                self.violate(f"{machine.key} lives on: {wait.what} for {wait.for_s:.2f} s")
        if target is instance.S.STUCK and source is not target:
            self._suspected(machine, process, node.process)

    def _stands(self, node: Node) -> tuple[str, float]:
        """What of it stands still ("": nothing), and until when that must be noticed."""
        loop, fabric = wedged(node.instance), self.world.fabric
        if node.devices[0].hung:
            return "device", self._seen_after_s
        if loop is not None and (loop.is_awake or loop._under_way):
            return "steps", self._seen_after_s
        held = any(one.writer is node.process for one in vars(fabric).get("held", ()))
        link_s = self.context.cluster.settings.timing.link_timeout_s
        return "transfers" * held, self._seen_after_s + 2 * link_s

    def _have_run(self, for_s: float, *processes: SimProcess) -> bool:
        """Who stood still reads heartbeats of long ago."""
        return all(one.resumed_s < self.world.loop.now_s - for_s for one in processes)

    def _suspected(self, machine: instance.Instance, *processes: SimProcess) -> None:
        name = machine.info.address.instance_id
        is_alone = self.context.cluster.groups.size_of(name) == 1  # no other rank holds it up
        over = [wait.for_s for wait in machine.load.waits if wait.for_s > wait.bound_s]
        if is_alone and not self.context.devices_hang and self._have_run(max(over), *processes):
            self.violate(f"{machine.key} {machine.reason}, and nothing held it up")

    def _placed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(event, generation.Placed)
        gateway = self.context.cluster.nodes[process.name].gateway
        chosen = event.placement.instances()
        for one in gateway.registry.instances if gateway is not None else ():
            if one.info.address.instance_id in chosen and one.state is not instance.S.HEALTHY:
                self.violate(f"{machine.key} is placed at {one.key}, which is {one.state.name}")
