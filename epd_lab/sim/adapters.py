"""Who loads and unloads adapters at the simulated gateway, and what became of it."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

from epd.frontend import Adapter, Refused
from epd.roles.compose import Gateway
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import World


@dataclass(slots=True)
class Desk:
    """Of one run."""

    world: World
    spoiled: dict[str, frozenset[str]] = field(default_factory=dict)  # by instance, digests
    waiting: dict[str, SimProcess] = field(default_factory=dict)  # calls without an answer

    def start(self, gateway: Gateway, digests: tuple[str, ...]) -> None:
        """Instances hold these from their start, each under its digest."""
        gateway.start()
        if gateway.adapters is not None:
            gateway.adapters.begin({one: Adapter(one, one) for one in digests})

    def spoil(self, instance_id: str, digest: str) -> None:
        self.spoiled[instance_id] = self.spoils(instance_id) | {digest}

    def spoils(self, instance_id: str) -> frozenset[str]:
        return self.spoiled.get(instance_id, frozenset())

    def ask(self, process: SimProcess, gateway: Gateway, text: str) -> bool:
        """`NAME=DIGEST` is loaded, `NAME` unloaded; False: nobody could ask that."""
        name, _, digest = text.partition("=")
        if (desk := gateway.adapters) is None:
            return False
        work = desk.load(Adapter(name, digest), name) if digest else desk.unload(name)
        call = f"{text} at {self.world.loop.now_s:.4f} s"
        self.waiting[call] = process
        self.world.loop.create_task(self._answered(call, work), name=call, context=process.context)
        return True

    async def _answered(self, call: str, work: Awaitable[None]) -> None:
        try:
            await work
            told = "done"
        except Refused as refused:
            told = refused.message
        del self.waiting[call]
        self.world.trace("adapters", call, told)
        self.world.fired["adapter_refused"] += told != "done"
