"""What lives in a simulated process, and its epochs, as the composition root has them: the next one
keeps the engines.

A process whose epoch was declared lost ends all that it began, and goes on as another epoch, which
attests that.  One that cannot, as a group's leader, ends itself, and its supervisor starts another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epd.roles.base import Actor
from epd.roles.compose import Engines, Gateway, Instance
from epd.roles.ports import Log, Ports
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.engine.engines import SimLanguageEngine
from epd_lab.sim.world import World


class SimLog(Log):
    """Keeps what a role logs, for failures and for the checkers."""

    def __init__(self, world: World, process: SimProcess) -> None:
        self._world = world
        self._process = process
        self.warnings: list[str] = []

    def warning(self, text: str, **fields: object) -> None:
        line = f"{self._process.name} {text} {fields}"
        self.warnings.append(line)
        self._world.trace("warning", line)

    def info(self, text: str, **fields: object) -> None:
        self._world.trace("info", self._process.name, text)


@dataclass(slots=True)
class Node:
    """What lives in one simulated process: a gateway or an instance."""

    process: SimProcess
    actor: Actor
    ports: Ports
    gateway: Gateway | None = None
    instance: Instance | None = None
    language: SimLanguageEngine | None = None
    engines: Engines = field(default_factory=Engines)
    devices: list[SimDevice] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        log = self.ports.log
        return log.warnings if isinstance(log, SimLog) else []

    def live(self) -> dict[str, int]:
        """What its roles own now, without zeros."""
        owner = self.gateway or self.instance
        return {k: n for k, n in owner.live().items() if n} if owner is not None else {}

    def tasks(self) -> list[str]:
        """Names of its open tasks, but for those that begin for ever."""
        return [name for name in self.actor._tasks if not name.startswith("list storage")]

    def timers(self, but: tuple[str, ...]) -> list[str]:
        """Names of its armed timers, but for those that begin so."""
        return [name for name in self.actor.timers if not name.startswith(but)]


class Lives:
    """`ends`: has a process end, by its reason; `main`: what an instance runs."""

    def __init__(
        self,
        world: World,
        ends: Callable[[str, Node, str], None],
        main: Callable[[SimProcess], None],
    ) -> None:
        self._world = world
        self._ends = ends
        self._main = main
        self._kept: dict[str, tuple[Engines, list[SimDevice]]] = {}  # by the life that gets them

    def kept(self, process: SimProcess) -> tuple[Engines, list[SimDevice]] | None:
        """What its former epoch has left it."""
        return self._kept.pop(process.name, None)

    def expelled(self, node: Node, reason: str) -> None:
        process = node.process
        has_name = self._world.processes[process.instance_id] is process
        if node.engines.rest is None or process.is_stranger or not has_name:
            self._ends("expelled", node, reason)
            return
        self._world.trace("expelled", node.process.name, reason)
        self._world.fired["expelled"] += 1
        self._world.loop.create_task(self._end(node), name=f"end {node.process.name}")

    async def _end(self, node: Node) -> None:
        assert node.instance is not None
        if await node.instance.end_life():
            self._world.loop.call_next(self._renew, node)
        else:
            self._ends("not_renewed", node, "something may still move")

    def _renew(self, node: Node) -> None:
        if node.process.alive:
            if node.devices[0].is_busy:
                self._world.violate(
                    f"[lives] steps of {node.process.name} run on in its next epoch"
                )
            later = self._world.renew(node.process, self._main)
            for device in node.devices:
                device.process = later
            self._kept[later.name] = node.engines, node.devices
