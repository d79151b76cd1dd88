"""The data plane of one instance: one memory, several ways to it.

A region is made once, by the first backend that the instance offers, and the others expose the same
memory.  Which descriptor a peer gets depends on the pair (`epd.scheduling.pairing`), so one receive
pool serves shared memory from this host and TCP or mooncake from others at the same time.

A write whose target lives in this process goes there directly, by copy or by reference, whichever
backend allocated the region: when two stages of a request meet in one instance the hop is local,
with nothing for the role to decide.  Every other write goes to the backend named in the descriptor.

`BACKENDS` is the seam: a new backend is a factory in this table, or of somebody else's module
(`epd.transport.foreign`), for a class that passes tests/contract/transfer_kit.py; one that can also
expose memory of another backend has the methods of `Exposes`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from epd.config import MOONCAKE_OVER_TCP, MooncakeConfig, is_foreign
from epd.messages import Address, RemoteRegion, TransportOffer
from epd.transport import foreign
from epd.transport.backend import BackendFactory, BackendSettings, Exposes
from epd.transport.base import (
    Buffer,
    Region,
    TransferEngine,
    TransportError,
    WriteFailed,
    WriteOutcome,
)
from epd.transport.checksum import is_summed
from epd.transport.endpoint import is_tcp, split_tcp
from epd.transport.file import FileTransferEngine
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.mooncake import MooncakeTransferEngine
from epd.transport.offers import offer
from epd.transport.region import RegionKey, SlotRegion, key_of
from epd.transport.shm import ShmTransferEngine
from epd.transport.tcp import TcpTransferEngine


def _make_shm(its: BackendSettings) -> TransferEngine:
    return ShmTransferEngine(its.instance_id, its.epoch, checksums=its.checksums)


def _make_tcp(its: BackendSettings) -> TransferEngine:
    return TcpTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret
    )


def _make_mooncake(its: BackendSettings) -> TransferEngine:
    return MooncakeTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret,
        config=its.mooncake,
    )  # fmt: skip


def _make_file(its: BackendSettings) -> TransferEngine:
    directory = directory_of(its.directory)
    return FileTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, directory=directory
    )


def directory_of(configured: str) -> str:
    """The directory of the file transport."""
    return configured or os.path.join(tempfile.gettempdir(), f"epd-rows-{os.getuid()}")


BACKENDS: dict[str, BackendFactory] = {
    "shm": _make_shm,
    "tcp": _make_tcp,
    "mooncake": _make_mooncake,
    "file": _make_file,
}


def _offer(name: str, engine: TransferEngine, host: str, directory: str) -> TransportOffer:
    if isinstance(engine, foreign.Reaches):
        return TransportOffer(name, engine.domain)
    return offer(name, host, directory_of(directory))


def data_host(endpoint: str) -> str:
    """Where the data plane listens: at the address of the bus, or on loopback beside ipc."""
    if not is_tcp(endpoint):
        return "127.0.0.1"
    host = split_tcp(endpoint)[0]
    return "127.0.0.1" if host == "localhost" else host


class RoutingTransferEngine:
    """`DataPlane` over several backends.

    `memory` is the one table of this process; `preferred` is the backend that makes own regions:
    `shm` if other processes must reach them, `local` if all stages are in this process.  `also`:
    backends by which peers can reach the same memory.
    """

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        memory: LocalMemory,
        *,
        preferred: str = "shm",
        also: Sequence[str] = (),
        checksums: str = "auto",
        host: str = "127.0.0.1",
        secret: bytes = b"",
        directory: str = "",
        options: Mapping[str, Any] | None = None,
        mooncake: MooncakeConfig = MOONCAKE_OVER_TCP,
        factories: Mapping[str, BackendFactory] = BACKENDS,
    ) -> None:
        names = [name for name in (preferred, *also) if name != "local"]
        if unknown := [n for n in names if n not in factories and not is_foreign(n)]:
            raise TransportError(
                f"there is no transfer backend {unknown[0]!r}: choose one of "
                f"{', '.join(['local', *factories])}"
            )
        self._memory = memory
        self._local = LocalTransferEngine(
            instance_id, epoch, memory, checksums=is_summed(checksums, "local")
        )
        self._backends: dict[str, TransferEngine] = {}
        for name in names:
            settings = BackendSettings(
                instance_id, epoch, is_summed(checksums, name), host, secret, directory, mooncake,
                name, options or {},
            )  # fmt: skip
            make = factories.get(name) or partial(foreign.make, name)
            self._backends[name] = make(settings)
        self._preferred: TransferEngine = self._backends.get(preferred, self._local)
        self._exposed: dict[RegionKey, dict[str, RemoteRegion]] = {}
        self.offers = (
            offer("local", host, directory),
            *(_offer(name, engine, host, directory) for name, engine in self._backends.items()),
        )

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> Region:
        """Memory of the preferred backend, reachable in this process as well."""
        region = self._preferred.allocate(name, num_slots, slot_nbytes, by_reference=by_reference)
        if isinstance(region, SlotRegion):  # host memory
            self._memory.add(region)
            self._exposed[key_of(region.remote)] = {
                name: backend.expose(region)
                for name, backend in self._backends.items()
                if backend is not self._preferred and isinstance(backend, Exposes)
            }
        return region

    def descriptor(self, region: Region, transport: str) -> RemoteRegion:
        """See `DataPlane.descriptor`."""
        exposed = self._exposed.get(key_of(region.remote), {})
        return exposed.get(transport, region.remote)

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

    async def fence(self, peer: Address, host_id: str, pid: int) -> bool:
        """True once no backend can bring bytes of this life of the peer any more."""
        local = await self._local.fence(peer, host_id, pid)
        if pid == os.getpid() and host_id in ("", this_host_id()):
            return local  # a peer in this process writes through the local table alone
        answers = await asyncio.gather(
            *(backend.fence(peer, host_id, pid) for backend in self._backends.values())
        )
        return local and all(answers)

    def revoke(self, region: Region) -> None:
        """Out of every table; see `TransferEngine.revoke`."""
        if isinstance(region, SlotRegion):
            self._memory.remove(region)
            for name, remote in self._exposed.pop(key_of(region.remote), {}).items():
                exposing = self._backends[name]
                assert isinstance(exposing, Exposes)
                exposing.conceal(region, remote)
        backend = self._backends.get(region.remote.backend, self._local)
        backend.revoke(region)

    async def close(self) -> None:
        """Close all backends, the one that owns the memory last; each waits for its own writes."""
        await self._local.close()
        for backend in reversed(self._backends.values()):
            await backend.close()
