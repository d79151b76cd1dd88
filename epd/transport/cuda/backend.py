"""Data plane between GPUs of one host: the writer's copy engine writes into the owner's memory.

A region is device memory that its owner hands out as a file descriptor (`memory_socket.py`).  A
writer maps it for its own device, once per (instance, epoch, region), and keeps the mapping.  All
is copied from where it lies, slot by slot if it is scattered.  A write has ended when an event
behind its copies has passed.  So nothing passes through host memory or a multiprocessor of the GPU,
and the host only queues and waits.

A queued copy cannot be taken back, and ends with its process.  Therefore the fence is the end of
that process, which its pidfd shows, and nothing less: a file lock is free before the last bytes
have landed.  If the device fails under a write, its outcome is unknown until all that was queued
has passed.

A mapping of a dead owner's memory keeps that memory taken.  It is unmapped as soon as the owner's
socket closes, behind the last own copy.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import (
    Life,
    Region,
    TransportError,
    WriteOutcome,
    WriteUnknown,
    Written,
)
from epd.transport.cuda.device import Device, DeviceError, DeviceMemory, index_of
from epd.transport.cuda.driver import CudaDevice, missing
from epd.transport.cuda.ends import CudaEnds
from epd.transport.cuda.memory_socket import Door, MemoryQuestion, MemorySocket, ask, own_directory
from epd.transport.cuda.queue import DeviceQueue, is_quick
from epd.transport.cuda.sources import DeviceSources
from epd.transport.host import this_host_id
from epd.transport.host_engine import Write
from epd.transport.region import (
    RegionKey,
    SlotRegion,
    WriteRefused,
    check_shape,
    key_of,
    recut,
)

LOCATOR = re.compile(r"[0-9a-f]{16}\.sock")


class _Mapping:
    """A peer's region; unmapped when it is not served and nothing of ours moves in it."""

    def __init__(
        self, remote: RemoteRegion, memory: DeviceMemory, threads: ThreadPoolExecutor
    ) -> None:
        self.remote = remote
        self.memory = memory
        self.door: Door | None = None
        self._threads = threads
        self._num_writes = 0
        self.is_dropped = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._num_writes += 1
        try:
            yield
        finally:
            self._num_writes -= 1
            self._unmap()

    def drop(self) -> None:
        self.is_dropped = True
        if self.door is not None:
            self.door.close()
        self._unmap()

    def _unmap(self) -> None:
        if self.is_dropped and not self._num_writes:
            with suppress(RuntimeError):  # the engine is closed: with the process it goes, too
                self._threads.submit(self.memory.close)


def _not_served(target: RemoteRegion) -> WriteRefused:
    owner = f"{target.instance_id}:{target.epoch}"
    return WriteRefused(f"region {target.region_id!r} of {owner} was revoked, or its owner is dead")


class CudaTransferEngine(DeviceSources):
    """One instance's data plane towards GPUs of its host.  Raises TransportError."""

    kind = "cuda"

    def __init__(self, its: BackendSettings, device: Device, directory: str = "") -> None:
        super().__init__(its)
        self._device = device
        self._directory = directory or own_directory()
        self._socket: MemorySocket | None = None
        self._memories: dict[RegionKey, DeviceMemory] = {}  # own
        self._mapped: dict[RegionKey, asyncio.Task[_Mapping]] = {}
        self._num_doubts = self._num_settled = 0  # writes of which something may still move; passed
        self._queue = DeviceQueue(device, checksums=self._copier.checksums)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="epd-cuda")
        self._ends = CudaEnds()

    @property
    def domain(self) -> str:
        """Who sees our processes, can open our sockets, and has a GPU that reaches ours."""
        directory = os.stat(self._directory)
        places = (str(directory.st_dev), str(directory.st_ino))
        return ":".join((this_host_id(), *places, self._device.domain))

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Device memory, zeroed; `by_reference` changes nothing: nobody deposits here."""
        nbytes = check_shape(name, num_slots, slot_nbytes)
        try:
            memory = self._device.allocate(nbytes)
        except DeviceError as error:
            raise _no_room(name, nbytes, error, "prefill.pool_nbytes") from None
        return self._region(name, memory, num_slots, slot_nbytes, by_reference=by_reference)

    def register(self, name: str, memory: DeviceMemory, slot_nbytes: int) -> SlotRegion:
        """Of this process, whichever `Device` of the same GPU has made it."""
        return self._region(name, memory, memory.nbytes // slot_nbytes, slot_nbytes)

    def _region(
        self, name: str, memory: DeviceMemory, num_slots: int, slot_nbytes: int, *,
        by_reference: bool = False,
    ) -> SlotRegion:  # fmt: skip
        if self._socket is None:
            self._socket = MemorySocket(self._directory, self._export)
        region_id = self._region_ids.new(name)
        remote = self._remote(region_id, self._socket.name, num_slots, slot_nbytes)
        whole = memory.whole[: num_slots * slot_nbytes]
        region = SlotRegion(remote, whole, by_reference=by_reference)
        self._own[region_id] = region
        self._memories[key_of(remote)] = memory
        return region

    def recut(self, region: Region, num_parts: int) -> SlotRegion:
        assert isinstance(region, SlotRegion)
        fine = recut(region, num_parts)
        self._own[fine.remote.region_id] = fine
        self._memories[key_of(fine.remote)] = self._memories[key_of(region.remote)]
        return fine

    def _export(self, question: MemoryQuestion) -> int:
        region = self._own.get(question.region.region_id)
        if region is None or region.remote != question.region:
            raise WriteRefused(f"region {question.region.region_id!r} is not as described, or gone")
        return self._memories[key_of(region.remote)].export()

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        super().conceal(region, remote)
        del self._memories[key_of(remote)]  # what still refers to it keeps it mapped
        assert self._socket is not None
        self._socket.withdraw(remote)

    # --- writing ----------------------------------------------------------------------------------

    async def _write(self, write: Write) -> WriteOutcome:
        mapping = await self._mapping(write.target)
        loop = asyncio.get_running_loop()
        base = mapping.memory.address
        with mapping.in_use():
            try:
                if is_quick(write) and not self._copier.checksums:
                    queued = self._queue.put(base, write)
                else:
                    queued = await loop.run_in_executor(self._threads, self._queue.put, base, write)
                await self._ends.end_of(queued.passed)
            except DeviceError as error:
                self._num_doubts += 1
                return WriteUnknown(f"the device failed under a write: {error}")
        if queued.failure is not None:  # what had been queued has passed all the same
            raise WriteRefused(f"the write could not be queued: {queued.failure!r}")
        self._check(mapping, write.target)
        return Written(write.nbytes, queued.checksum)

    # --- peers' memory ----------------------------------------------------------------------------

    async def _mapping(self, target: RemoteRegion) -> _Mapping:
        """Mapped now or earlier, and served as far as the loop has seen: the owner is asked behind
        the write, and once is enough.  Raises WriteRefused."""
        if not LOCATOR.fullmatch(target.locator):
            raise WriteRefused(f"{target.locator!r} is not the socket of an owner")
        key = key_of(target)
        opening = self._mapped.get(key)
        if opening is None:
            opening = asyncio.get_running_loop().create_task(self._map(target))
            self._mapped[key] = opening
        try:
            mapping = await opening
        except BaseException:
            self._mapped.pop(key, None)
            raise
        if mapping.remote != target:
            raise WriteRefused(f"region {target.region_id!r} is described differently than before")
        if mapping.is_dropped:
            raise _not_served(target)
        return mapping

    def _check(self, mapping: _Mapping, target: RemoteRegion) -> None:
        assert mapping.door is not None
        if not mapping.door.is_open():
            self._drop(target)
            raise _not_served(target)

    async def _map(self, target: RemoteRegion) -> _Mapping:
        path = os.path.join(self._directory, target.locator)
        wire, fd = await ask(path, MemoryQuestion(self._life[0], self._life[1], target))
        nbytes = target.num_slots * target.slot_nbytes
        try:
            loop = asyncio.get_running_loop()
            memory = await loop.run_in_executor(self._threads, self._device.open, fd, nbytes)
        except DeviceError as error:
            wire.close()
            raise WriteRefused(
                f"the memory of {target.instance_id} is not mapped: {error}"
            ) from None
        finally:
            os.close(fd)
        mapping = _Mapping(target, memory, self._threads)
        mapping.door = Door(wire, lambda: self._drop(target))
        return mapping

    def _drop(self, target: RemoteRegion) -> None:
        opened = self._mapped.pop(key_of(target), None)
        if opened is not None and opened.done() and not opened.cancelled():
            opened.result().drop()

    # --- ends -------------------------------------------------------------------------------------

    async def settle(self, peer: Address) -> bool:
        """Our writes in flight have ended, to whomever, and the device has passed what failed."""
        if not await super().settle(peer):
            return False
        if (num_doubts := self._num_doubts) > self._num_settled:
            try:
                await self._ends.end_of(self._queue.mark())
            except DeviceError:
                return False
            self._num_settled = max(self._num_settled, num_doubts)
        return self._num_settled == self._num_doubts

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """Hand out nothing to that life any more; True once it has mapped nothing, or its process
        has ended.  Who it was has been asked of the kernel when it was handed our memory."""
        life: Life = (peer.instance_id, peer.epoch)
        over = self._socket is None or self._socket.bar(life, has_ended=has_ended)
        return over and await self.settle(peer)

    async def close(self) -> bool:
        if self._closed:
            return self._num_settled == self._num_doubts
        drained = await super().close()
        for opened in list(self._mapped.values()):
            with suppress(WriteRefused):  # it was not mapped
                self._drop((await opened).remote)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._threads.shutdown(wait=False)
        self._ends.close()
        return drained and self._num_settled == self._num_doubts


def _no_room(name: str, nbytes: int, error: DeviceError, lower: str) -> TransportError:
    return TransportError(
        f"device memory for {name} needs {nbytes / 2**20:.1f} MiB ({error}): lower {lower}, or use "
        "another --transport"
    )


def memory(device: str, nbytes: int) -> DeviceMemory:
    """Of a device, zeroed, for `register`.  Raises TransportError."""
    try:
        return CudaDevice(index_of(device)).allocate(nbytes)
    except DeviceError as error:
        raise _no_room("the KV pool", nbytes, error, "--kv-nbytes") from None


def make(its: BackendSettings) -> CudaTransferEngine:
    if reason := missing():
        raise TransportError(f"transport cuda cannot be used: {reason}")
    if not its.device.startswith("cuda"):
        raise TransportError(
            "transport cuda moves what lies on a GPU: start with --device cuda, or use another "
            "--transport"
        )
    try:
        device = CudaDevice(index_of(its.device))
    except DeviceError as error:
        raise TransportError(
            f"transport cuda cannot use {its.device}: {error}; use another --transport"
        ) from None
    return CudaTransferEngine(its, device)
