"""Instances whose devices reach each other: KV goes straight into the owner's pool.

Between two of them a pair uses the transport `near`; any other pair uses that of
`SimTransferEngine`, and KV lands in front of the pool.  So one decode instance has rooms of both
kinds at a time, whose slots are numbers of different memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd.messages import RemoteRegion, TransportOffer
from epd.transport.base import Buffer, Region, WriteOutcome
from epd.transport.region import RegionKey, SlotRegion, key_of
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.planes.transfer import Fabric, SimTransferEngine

NEAR = "near"


class NearTransferEngine(SimTransferEngine):
    """Of one simulated process, or of a rank."""

    def __init__(self, fabric: Fabric, process: SimProcess) -> None:
        super().__init__(fabric, process)
        self._mirrors: dict[RegionKey, Region] = {}

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        return (TransportOffer(name=NEAR, domain="host"), *super().offers)

    def mirror(self, region: Region, memory: Any = None) -> Region | None:
        """None of rows: they go through the host, as if their device were full."""
        if memory is None:
            return None
        its = region.remote
        remote = RemoteRegion(
            backend=NEAR,
            instance_id=its.instance_id,
            epoch=its.epoch,
            region_id=self._region_ids.new(f"{its.region_id}-{NEAR}"),
            locator="",
            slot_nbytes=its.slot_nbytes,
            num_slots=len(memory.whole) // its.slot_nbytes,
        )
        pool = SlotRegion(remote, memory.whole, by_reference=False)
        self._fabric.regions[key_of(remote)] = (pool, self._process)
        self._mirrors[key_of(its)] = pool
        return pool

    def landing(self, region: Region, transport: str) -> Region:
        return self._mirrors.get(key_of(region.remote), region) if transport == NEAR else region

    def descriptor(self, region: Region, transport: str) -> RemoteRegion:
        return self.landing(region, transport).remote

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        self._fabric.counters["near_write"] += target.backend == NEAR
        return await super().write(source, target, slots)


def is_near(fabric: Fabric, instance_id: str) -> bool:
    return instance_id.startswith(fabric.near) if fabric.near else False


def transfers_of(fabric: Fabric, process: SimProcess) -> SimTransferEngine:
    """The data plane of a process, of what it can reach."""
    if is_near(fabric, process.instance_id):
        return NearTransferEngine(fabric, process)
    return SimTransferEngine(fabric, process)
