"""The data plane of one instance: picks the backend for each write.

A write whose target lives in this process goes there directly, by copy or by reference, whichever
backend allocated the region: when two stages of a request meet in one instance the hop is local,
with nothing for the role to decide.  Every other write goes to the backend named in the descriptor.

`BACKENDS` is the seam: a new backend is a factory in this table, a class that passes
tests/contract/transfer_kit.py, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epd.config import TRANSPORTS
from epd.messages import Address, RemoteRegion
from epd.transport.base import (
    Buffer,
    Region,
    TransferEngine,
    TransportError,
    WriteFailed,
    WriteOutcome,
)
from epd.transport.checksum import is_summed
from epd.transport.endpoint import is_loopback, is_tcp, split_tcp
from epd.transport.file import FileTransferEngine
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.mooncake import MooncakeTransferEngine
from epd.transport.region import SlotRegion
from epd.transport.shm import ShmTransferEngine
from epd.transport.tcp import TcpTransferEngine


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend may need to know of its instance; each takes what concerns it."""

    instance_id: str
    epoch: int
    checksums: bool = False
    host: str = "127.0.0.1"  # where peers on other hosts can reach this one
    secret: bytes = b""  # of the cluster; required beyond loopback
    directory: str = ""  # shared by all instances; empty: below the system's temporary directory


BackendFactory = Callable[[BackendSettings], TransferEngine]


def _make_shm(its: BackendSettings) -> TransferEngine:
    return ShmTransferEngine(its.instance_id, its.epoch, checksums=its.checksums)


def _make_tcp(its: BackendSettings) -> TransferEngine:
    return TcpTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret
    )


def _make_mooncake(its: BackendSettings) -> TransferEngine:
    return MooncakeTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret
    )


def _make_file(its: BackendSettings) -> TransferEngine:
    directory = its.directory or os.path.join(tempfile.gettempdir(), f"epd-rows-{os.getuid()}")
    return FileTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, directory=directory
    )


BACKENDS: dict[str, BackendFactory] = {
    "shm": _make_shm,
    "tcp": _make_tcp,
    "mooncake": _make_mooncake,
    "file": _make_file,
}


def data_host(endpoint: str) -> str:
    """Where the data plane listens: at the address of the bus, or on loopback beside ipc."""
    if not is_tcp(endpoint):
        return "127.0.0.1"
    host = split_tcp(endpoint)[0]
    return "127.0.0.1" if host == "localhost" else host


def choose_backend(transport: str, endpoint: str) -> str:
    """The backend that `transport` means for an instance whose bus listens at `endpoint`.

    `auto`: shared memory where all instances are on this host, TCP where some may not be.  Raises
    TransportError for a name that is none.
    """
    if transport == "auto":
        return "tcp" if is_tcp(endpoint) and not is_loopback(endpoint) else "shm"
    if transport not in BACKENDS:
        raise TransportError(
            f"there is no transport {transport!r}: choose one of {', '.join(TRANSPORTS)}"
        )
    return transport


class RoutingTransferEngine:
    """`TransferEngine` over several backends.

    `memory` is the one table of this process; `preferred` is the backend of own regions: `shm` if
    other processes must reach them, `local` if all stages are in this process.
    """

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        memory: LocalMemory,
        *,
        preferred: str = "shm",
        checksums: str = "auto",
        host: str = "127.0.0.1",
        secret: bytes = b"",
        directory: str = "",
        factories: Mapping[str, BackendFactory] = BACKENDS,
    ) -> None:
        if preferred != "local" and preferred not in factories:
            raise TransportError(
                f"there is no transfer backend {preferred!r}: choose one of "
                f"{', '.join(['local', *factories])}"
            )
        self._memory = memory
        self._local = LocalTransferEngine(
            instance_id, epoch, memory, checksums=is_summed(checksums, "local")
        )
        self._backends: dict[str, TransferEngine] = {}
        if preferred != "local":
            self._backends[preferred] = factories[preferred](
                BackendSettings(
                    instance_id, epoch, is_summed(checksums, preferred), host, secret, directory
                )
            )
        self._preferred: TransferEngine = self._backends.get(preferred, self._local)

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> Region:
        """Memory of the preferred backend, reachable in this process as well."""
        region = self._preferred.allocate(name, num_slots, slot_nbytes, by_reference=by_reference)
        if isinstance(region, SlotRegion):  # host memory
            self._memory.add(region)
        return region

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
        backend = self._backends.get(region.remote.backend, self._local)
        backend.revoke(region)

    async def close(self) -> None:
        """Close all backends; each waits for its own writes."""
        await self._local.close()
        for backend in self._backends.values():
            await backend.close()
