"""The data plane of one instance: one memory, several ways to it.

A region is made once, by the first backend that the instance offers, and the others expose the same
memory.  The descriptor for a peer depends on the pair (`epd.scheduling.pairing`), so one receive
pool serves shared memory from this host and TCP or mooncake from others at the same time.

A write whose target lives in this process goes there directly, by copy or by reference, whichever
backend allocated the region.  So the hop of two stages in one instance is local, with nothing for
the role to decide.  Every other write goes to the backend named in the descriptor.

A backend that can also expose memory of another one has the methods of `Exposes`.  One whose
regions lie on a device (`OnDevice`) cannot: it has a mirror there, of the same slots, or another
memory in their place (`mirror`).  The transport of the pair decides which of the two is filled."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from epd.messages import Address, RemoteRegion, TransportLack, TransportOffer
from epd.transport.backend import Backend, BackendEngine, BackendSettings, Exposes, OnDevice
from epd.transport.base import Buffer, Region, TransferEngine, WriteFailed, WriteOutcome
from epd.transport.checksum import is_summed
from epd.transport.endpoint import is_tcp, split_tcp
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.region import RegionKey, SlotRegion, key_of, recut


def data_host(endpoint: str) -> str:
    """Where the data plane listens: at the address of the bus, or on loopback beside ipc."""
    if not is_tcp(endpoint):
        return "127.0.0.1"
    host = split_tcp(endpoint)[0]
    return "127.0.0.1" if host == "localhost" else host


class RoutingTransferEngine:
    """`DataPlane` over several backends.

    `memory`: the one table of this process.  `backends`: by which other processes reach own
    regions; the first makes them.  None: all stages are in this process.
    """

    def __init__(
        self,
        settings: BackendSettings,
        memory: LocalMemory,
        backends: Sequence[Backend] = (),
        *,
        checksums: str = "auto",
        lacks: tuple[TransportLack, ...] = (),
    ) -> None:
        summed = is_summed(checksums, leaves_host=False)
        self._memory = memory
        self._local = LocalTransferEngine(replace(settings, checksums=summed), memory)
        self._backends: dict[str, BackendEngine] = {}
        for backend in backends:
            summed = is_summed(checksums, leaves_host=backend.leaves_host)
            own = replace(settings, name=backend.name, checksums=summed)
            self._backends[backend.name] = backend.make(own)
        mirrors = {backend.name for backend in backends if backend.on_device}
        on_host = (engine for name, engine in self._backends.items() if name not in mirrors)
        self._preferred: TransferEngine = next(on_host, self._local)
        self._device = next((self._backends[name] for name in mirrors), None)
        self._mirrors: dict[RegionKey, Region] = {}
        self._exposed: dict[RegionKey, dict[str, RemoteRegion]] = {}
        self._cuts: dict[RegionKey, SlotRegion] = {}  # by what they are cut from
        self.lacks = lacks
        ranked = sorted(backends, key=lambda backend: (backend.rank, backend.name))
        self.offers = (
            TransportOffer(name="local", domain=self._local.domain),
            *(TransportOffer(name=b.name, domain=self._backends[b.name].domain) for b in ranked),
        )

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> Region:
        """Memory of the preferred backend, reachable in this process as well."""
        region = self._preferred.allocate(name, num_slots, slot_nbytes, by_reference=by_reference)
        if isinstance(region, SlotRegion):  # host memory
            self._expose(region, self._preferred)
        return region

    def _expose(self, region: SlotRegion, made_by: TransferEngine | None = None) -> None:
        self._memory.add(region)
        self._exposed[key_of(region.remote)] = {
            name: backend.expose(region)
            for name, backend in self._backends.items()
            if backend is not made_by and isinstance(backend, Exposes)
        }

    def descriptor(self, region: Region, transport: str) -> RemoteRegion:
        exposed = self._exposed.get(key_of(region.remote), {})
        return exposed.get(transport) or self.landing(region, transport).remote

    def parts(self, region: Region, transport: str) -> tuple[RemoteRegion, ...]:
        """Of one rank."""
        return ()

    def recut(self, region: Region, num_parts: int) -> Region:
        """See `DataPlane.recut`: for each region once."""
        key = key_of(region.remote)
        if key not in self._cuts:
            assert isinstance(region, SlotRegion)
            fine = self._cuts[key] = recut(region, num_parts)
            self._expose(fine)
            mirror = self._mirrors.get(key)
            if mirror is not None and isinstance(self._device, OnDevice):
                self._mirrors[key_of(fine.remote)] = self._device.recut(mirror, num_parts)
        return self._cuts[key]

    def mirror(self, region: Region, memory: object = None) -> Region | None:
        device, its = self._device, region.remote
        if device is None:
            return None
        if memory is None:
            mirror = device.allocate(its.region_id, its.num_slots, its.slot_nbytes)
        else:
            assert isinstance(device, OnDevice)
            mirror = device.register(its.region_id, memory, its.slot_nbytes)
        self._mirrors[key_of(its)] = mirror
        return mirror

    def landing(self, region: Region, transport: str) -> Region:
        mirror = self._mirrors.get(key_of(region.remote))
        return region if mirror is None or mirror.remote.backend != transport else mirror

    def takes_references(self, target: RemoteRegion) -> bool:
        region = self._memory.find(target)
        if region is not None:
            return region.by_reference
        return self._device is not None and self._backends.get(target.backend) is self._device

    @property
    def refused(self) -> Counter[str]:
        counts = Counter[str]()
        for backend in self._backends.values():
            counts.update(getattr(backend, "refused", {}))
        return counts

    def guard(self, region: Region) -> None:
        if isinstance(region, SlotRegion):
            region.lent.guard()

    def lend(self, target: RemoteRegion, slots: Sequence[int], peer: Address, room: str) -> None:
        if (region := self._memory.listed(target)) is not None:
            region.lent.lend((peer.instance_id, peer.epoch), room, slots)

    def take_back(self, target: RemoteRegion, room: str) -> None:
        if (region := self._memory.listed(target)) is not None:
            region.lent.take_back(room)

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """Write through the shortest way to the target.  See `TransferEngine.write`."""
        if target.backend == "local" or self._memory.find(target) is not None:
            return await self._local.write(source, target, slots)
        backend = self._backends.get(target.backend)
        if backend is None:
            return WriteFailed(
                f"this instance has no {target.backend!r} backend to reach {target.instance_id}: "
                "start both with the same one"
            )
        return await backend.write(source, target, slots)

    async def checksum(self, views: Sequence[Buffer]) -> int:
        """See `TransferEngine.checksum`; the same sum on every backend."""
        return await self._local.checksum(views)

    async def settle(self, peer: Address) -> bool:
        """True once our writes to that peer have ended on every backend."""
        engines = (self._local, *self._backends.values())
        return all(await asyncio.gather(*(engine.settle(peer) for engine in engines)))

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """True once no backend can bring bytes of this life of the peer any more."""
        local = await self._local.fence(peer, host_id, pid, has_ended=has_ended)
        if pid == os.getpid() and host_id in ("", this_host_id()):
            return local  # a peer in this process writes through the local table alone
        answers = await asyncio.gather(
            *(one.fence(peer, host_id, pid, has_ended=has_ended) for one in self._backends.values())
        )
        return local and all(answers)

    def revoke(self, region: Region) -> None:
        """Out of every table; see `TransferEngine.revoke`."""
        if (fine := self._cuts.pop(key_of(region.remote), None)) is not None:
            self.revoke(fine)
        if (mirror := self._mirrors.pop(key_of(region.remote), None)) is not None:
            self._backends[mirror.remote.backend].revoke(mirror)
        if isinstance(region, SlotRegion):
            self._memory.remove(region)
            for name, remote in self._exposed.pop(key_of(region.remote), {}).items():
                exposing = self._backends[name]
                assert isinstance(exposing, Exposes)
                exposing.conceal(region, remote)
        backend = self._backends.get(region.remote.backend, self._local)
        backend.revoke(region)

    async def close(self) -> bool:
        """Close all backends, the one that owns the memory last; each waits for its own writes."""
        engines = (self._local, *reversed(self._backends.values()))
        return all([await engine.close() for engine in engines])
