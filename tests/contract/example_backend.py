"""A connector as somebody outside this project writes one: memory is a file that peers write into.

It uses what `docs/transports.md` names and nothing else of `epd`.  The owner maps a file of a
shared directory; a writer opens it, holds a shared lock while it writes, and closes it.  So `fence`
is a mark that writers look for under their lock, and one moment with the lock for itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Region, TransportError, WriteFailed, WriteOutcome, Written
from epd.transport.checksum import checksum_of
from epd.transport.region import (
    RECUT,
    RegionIds,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    plan,
)

BOUNDED_S = 0.8
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.mem")


class MappedFiles:
    """Its own option is `directory`."""

    def __init__(self, settings: BackendSettings) -> None:
        try:
            self._directory = os.path.abspath(settings.options["directory"])
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
        except KeyError:
            raise TransportError("MappedFiles needs a directory that all instances share") from None
        self._its = settings
        self._ids = RegionIds()
        self._regions: dict[str, SlotRegion] = {}  # by locator
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mapped-files")
        self._writes: set[asyncio.Future[WriteOutcome]] = set()
        self._closed = False

    @property
    def domain(self) -> str:
        """Who sees the same directory can exchange bytes."""
        found = os.stat(self._directory)
        return f"{found.st_dev}:{found.st_ino}"

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        nbytes = check_shape(name, num_slots, slot_nbytes)
        its = self._its
        remote = RemoteRegion(
            backend=its.name,
            instance_id=its.instance_id,
            epoch=its.epoch,
            region_id=self._ids.new(name),
            locator="",
            slot_nbytes=slot_nbytes,
            num_slots=num_slots,
        )
        locator = f"{_described(remote)}-{secrets.token_hex(4)}.mem"
        fd = os.open(self._path(locator), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            memory = memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        remote = RemoteRegion(
            backend=its.name,
            instance_id=its.instance_id,
            epoch=its.epoch,
            region_id=remote.region_id,
            locator=locator,
            slot_nbytes=slot_nbytes,
            num_slots=num_slots,
        )
        self._regions[locator] = region = SlotRegion(remote, memory, by_reference=by_reference)
        return region

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """Definite: a thread has written and closed the file, or never will."""
        try:
            views = byte_views(source)
            pieces = plan(views, target, slots)
            if self._closed:
                raise WriteRefused("the engine is closed")
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self._write, views, pieces, target)
        self._writes.add(future)
        future.add_done_callback(self._writes.discard)
        return await asyncio.shield(future)  # a cancelled caller does not end it

    def _write(self, views: list[memoryview], pieces: Any, target: RemoteRegion) -> WriteOutcome:
        path = self._path(target.locator)
        is_name = target.backend == self._its.name and NAME.fullmatch(target.locator)
        if not is_name or not target.locator.startswith(f"{_described(target)}-"):
            return WriteFailed(f"{target.locator!r} is not the region that is described")
        try:
            fd = os.open(path, os.O_WRONLY)
        except OSError:
            return WriteFailed(f"region {target.region_id} of {target.instance_id} was revoked")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.exists(_mark(path, self._its.instance_id, self._its.epoch)):
                return WriteFailed(f"{target.instance_id} has fenced this instance")
            for offset, view in pieces:
                while view.nbytes:
                    count = os.pwrite(fd, view, offset)
                    view, offset = view[count:], offset + count
        except OSError as error:
            return WriteFailed(str(error))
        finally:
            os.close(fd)
        checksum = checksum_of(views) if self._its.checksums else 0
        return Written(sum(view.nbytes for view in views), checksum)

    async def checksum(self, views: Sequence[Buffer]) -> int:
        return await asyncio.to_thread(checksum_of, byte_views(views))

    async def settle(self, peer: Address) -> bool:
        begun = set(self._writes)
        return not begun or not (await asyncio.wait(begun, timeout=BOUNDED_S))[1]

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """New writes see the mark; those under way end before the lock is had."""
        for locator in list(self._regions):
            path = self._path(locator)
            os.close(os.open(_mark(path, peer.instance_id, peer.epoch), os.O_CREAT, 0o600))
            if not await self._is_quiet(path):
                return False
        return await self.settle(peer)

    async def _is_quiet(self, path: str) -> bool:
        fd = os.open(path, os.O_WRONLY)
        try:
            for _ in range(int(BOUNDED_S / 0.02)):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(0.02)
                else:
                    return True
        finally:
            os.close(fd)
        return False

    def revoke(self, region: Region) -> None:
        own = self._regions.pop(region.remote.locator, None)
        if own is not None:
            own.release()
            self._remove(region.remote.locator)

    def _remove(self, locator: str) -> None:
        for name in os.listdir(self._directory):
            if name.startswith(locator):  # its marks too
                os.unlink(os.path.join(self._directory, name))

    async def close(self) -> bool:
        self._closed = True
        if self._writes:
            await asyncio.wait(set(self._writes))
        for region in list(self._regions.values()):
            self.revoke(region)
        self._threads.shutdown(wait=False)
        return True

    def _path(self, locator: str) -> str:
        return os.path.join(self._directory, locator)


def _described(remote: RemoteRegion) -> str:
    """Whose memory, which and how much, as the beginning of a file's name: it may be cut finer."""
    region_id = remote.region_id.removesuffix(RECUT)
    nbytes = remote.num_slots * remote.slot_nbytes
    return f"{remote.instance_id}-{remote.epoch}-{region_id}-{nbytes}"


def _mark(path: str, instance_id: str, epoch: int) -> str:
    return f"{path}.without-{instance_id}-{epoch}"
