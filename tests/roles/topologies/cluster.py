"""A whole topology in one process: production roles over the in-process bus and data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from epd.config import EngineConfig, GatewayConfig, InstanceConfig, Timing
from epd.fsm.story import RecordingJournal
from epd.roles.compose import Engines, Gateway, Instance
from epd.roles.ports import Ports
from epd.runtime.logs import LoggingLog
from epd.runtime.system import SystemClock, SystemRandom
from epd.transport.backend import BackendSettings
from epd.transport.bus.local import LocalBus, LocalBusHub
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine
from tests.patience import PATIENCE_S

# Repeats are quick; what a busy machine delays is neither lost nor late.
FAST = Timing(
    request_timeout_s=100.0,
    retry_interval_s=0.05,
    tombstone_s=0.2,
    heartbeat_interval_s=0.05,
    suspect_after_s=20.0,
    lost_after_s=30.0,
)


class Cluster:
    """A gateway and its instances."""

    def __init__(self, placement: Literal["auto", "fixed"] = "auto") -> None:
        """`placement`: fixed where a test says who serves, since auto goes by how long steps take,
        which is nobody's to say on a busy machine."""
        self.hub = LocalBusHub()
        self.memory = LocalMemory()
        self.clock = SystemClock()
        self.instances: dict[str, Instance] = {}
        self.engines: dict[str, Engines] = {}
        self.gateway = Gateway(
            self._ports("gateway", 1),
            GatewayConfig(timing=FAST, placement=placement),
            fingerprint="model",
        )

    def _ports(self, name: str, epoch: int) -> Ports:
        return Ports(
            clock=self.clock,
            bus=LocalBus(self.hub, name, epoch, codec=True),
            random=SystemRandom(),
            transfers=RoutingTransferEngine(
                BackendSettings(name, epoch), self.memory, checksums="always"
            ),
            journal=RecordingJournal(self.clock.now_s),
            log=LoggingLog(),
        )

    def add(self, name: str, roles: tuple[str, ...], engines: Engines, **settings: Any) -> Instance:
        """`settings`: its configuration, and `offers` of other transports than it has."""
        ports: Any = self._ports(name, 1)
        ports.transfers.offers = settings.pop("offers", ports.transfers.offers)
        config = InstanceConfig(
            instance_id=name, roles=roles, model_dir="", timing=FAST, **settings
        )
        instance = Instance(
            ports,
            config,
            engines,
            [self.gateway.actor.address],
            "model",
            "this-host",
            1,
        )
        self.instances[name], self.engines[name] = instance, engines
        return instance

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        self.gateway.start()
        for instance in self.instances.values():
            instance.start()
        async with asyncio.timeout(PATIENCE_S):
            while not self.gateway.role.ready().ok:
                await asyncio.sleep(0.01)
        try:
            yield self.gateway
        finally:
            for instance in self.instances.values():
                await instance.close()
            await self.gateway.close()

    async def settle(self) -> None:
        """Wait until nothing is owned anywhere."""
        async with asyncio.timeout(PATIENCE_S):
            while self.in_use():
                await asyncio.sleep(0.01)

    def in_use(self) -> dict[str, dict[str, int]]:
        everyone = {"gateway": self.gateway, **self.instances}
        used = {n: {k: c for k, c in i.live().items() if c} for n, i in everyone.items()}
        return {name: counts for name, counts in used.items() if counts}


SMALL = EngineConfig(kv_nbytes=16 << 20, threads=1)
