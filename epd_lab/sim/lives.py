"""What lives in a simulated process, and its epochs, as the composition root has them: the next one
keeps the engines, or gets those of other roles.

A process whose epoch was declared lost ends all that it began, and goes on as another epoch, which
attests that.  One that cannot, as a group's leader, ends itself, and its supervisor starts another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from epd.roles.base import Actor
from epd.roles.compose import Gateway, Instance
from epd.roles.holding import Holding
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
    held: Holding | None = None
    is_to_end: bool = False  # the process, behind this life
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
        roles: dict[str, tuple[str, ...]],
    ) -> None:
        """`roles`: of the next process of each name, as its supervisor has them."""
        self._world = world
        self._ends = ends
        self._main = main
        self._roles = roles
        self._kept: dict[str, tuple[Holding, list[SimDevice]]] = {}  # by the life that gets them
        self.loading: dict[str, Node] = {}  # by name: between two lives

    def kept(self, process: SimProcess) -> tuple[Holding, list[SimDevice]] | None:
        """What its former epoch has left it."""
        return self._kept.pop(process.name, None)

    def is_loading(self, process: SimProcess) -> bool:
        """Between two lives, when it has no instance."""
        node = self.loading.get(process.instance_id)
        return node is not None and node.process is process

    def follow(self, node: Node) -> None:
        """Have the process do what its membership asks for."""
        assert node.instance is not None
        member = node.instance.member
        member.on_rejected = partial(self._rejected, node)
        member.on_expelled = partial(self._expelled, node)
        member.on_drain_asked = partial(self._asked, node)
        member.on_welcome = partial(self._welcomed, node)

    def drain(self, node: Node) -> None:
        """Then the process ends."""
        assert node.instance is not None
        instance, process, loop = node.instance, node.process, self._world.loop
        node.is_to_end = True

        async def leave() -> None:
            await instance.drain()
            await instance.close()
            loop.call_next(self._world.exit, process)

        loop.create_task(leave(), name="drain", context=process.context)

    def _welcomed(self, node: Node) -> None:
        held, name = node.held, node.process.instance_id
        if held is not None and held.settle():
            self._roles[name] = held.config.roles
            self._world.fired["switched"] += 1

    def _rejected(self, node: Node, reason: str) -> None:
        if node.held is not None and node.held.is_on_trial:
            node.held.fail(reason)
            self._begin_end(node)
        else:
            self._ends("expelled", node, reason)

    def _asked(self, node: Node, restarts: bool, roles: tuple[str, ...]) -> None:
        if roles and node.held is not None and not node.held.asked:
            node.held.ask(roles)
            self._begin_end(node)

    def _expelled(self, node: Node, reason: str) -> None:
        process, held = node.process, node.held
        has_name = self._world.processes[process.instance_id] is process
        if held is None or held.engines.rest is None or process.is_stranger or not has_name:
            self._ends("expelled", node, reason)
            return
        self._world.trace("expelled", node.process.name, reason)
        self._world.fired["expelled"] += 1
        if not held.asked:  # else it ends already
            self._begin_end(node)

    def _begin_end(self, node: Node) -> None:
        self._world.loop.create_task(self._end(node), name=f"end {node.process.name}")

    async def _end(self, node: Node) -> None:
        instance, held = node.instance, node.held
        assert instance is not None
        assert held is not None
        if held.asked:
            await instance.drain()
        if node.is_to_end:
            return
        if not await instance.end_life():
            self._ends("not_renewed", node, "something may still move")
            return
        self.loading[node.process.instance_id] = node
        await held.renew()
        self._world.fired["rolled_back"] += bool(held.config.kept_roles)
        self._world.loop.call_next(self._renew, node)

    def _renew(self, node: Node) -> None:
        self.loading.pop(node.process.instance_id, None)
        if node.process.alive:
            if node.devices[0].is_busy:
                self._world.violate(
                    f"[lives] steps of {node.process.name} run on in its next epoch"
                )
            later = self._world.renew(node.process, self._main)
            for device in node.devices:
                device.process = later
            assert node.held is not None
            self._kept[later.name] = node.held, node.devices
