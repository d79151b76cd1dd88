"""Who is to have other roles returns with them, or with its former ones and the reason.

Whoever has roles has the engines for them.  A process that was killed meanwhile may have either."""

from __future__ import annotations

from epd.fsm import membership
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Switches(Checker):
    name = "switches"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._asked: dict[int, tuple[str, ...]] = {}  # by pid
        context.world.watch(self._is_asked, membership.DrainRequested)

    def _is_asked(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(event, membership.DrainRequested)
        if source is not target and event.next_roles:
            self._asked[process.pid] = event.next_roles

    def at_end(self) -> None:
        for node in self.context.cluster.living():
            one = node.instance
            if one is None:
                continue
            config, name = one.config, node.process.name
            asked = self._asked.get(node.process.pid, config.roles)
            if config.roles != asked and not config.kept_roles:
                self.violate(f"{name} was to have the roles {asked}, and has {config.roles}")
            speaks = "prefill" in config.roles or "decode" in config.roles
            # Prefill with a storage of rows has the role without a tower, too.
            lacks_tower = "encode" in config.roles and one.encode is None
            if lacks_tower or speaks != (one.requests is not None):
                self.violate(f"{name} has the roles {config.roles} without their engines")
