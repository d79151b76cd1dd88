"""Data plane through a shared directory: the simplest way between hosts that share a file system.

A region is a directory, and a write is one file in it that appears whole, by a rename; its name has
the life of the instance that wrote it.  The owner takes files in when it looks at their slots: it
maps them, unlinks them, and holds the mapping like a deposit until the lease ends.  So nothing is
copied at the reader, and bytes never change after they have appeared.  Only where the memory of a
region is read and no views (KV: not `by_reference`) it is a copy.

Outcomes are definite: a file was renamed or it was not.  The fence needs no dead process either.
From then on the owner ignores and removes files of a barred life, and a mark in the directory stops
a writer that still lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Life, TransportError, WriteOutcome, Written
from epd.transport.files.whole_file import open_whole, write_whole
from epd.transport.host_engine import HostEngine, Write
from epd.transport.host_memory import anonymous
from epd.transport.region import SlotRegion, WriteRefused, check_shape

NAME = re.compile(r"epd-[A-Za-z0-9._-]{1,240}")
ARRIVED = re.compile(r"[0-9]{20}-(?P<instance>[A-Za-z0-9._-]+)-(?P<epoch>[0-9]+)-[0-9a-f]{8}\.rows")
DESCRIPTION = "region"
NAME_OF_DIRECTORY = ".epd-directory"


class FileInbox:
    """The directory of one region: writes that were not looked at yet."""

    def __init__(self, directory: str, barred: set[Life]) -> None:
        self.directory = directory
        self._barred = barred

    def take_in(self, region: SlotRegion) -> None:
        """Map and unlink the files that have arrived, oldest first; those of the barred go."""
        for name in sorted(os.listdir(self.directory)):
            found = ARRIVED.fullmatch(name)
            if found is not None:
                self._take(region, name, (found["instance"], int(found["epoch"])))

    def remove(self) -> None:
        """Writers fail from now on."""
        gone = f"{self.directory}.gone"
        with contextlib.suppress(OSError):
            os.rename(self.directory, gone)  # at once and as a whole: no writer finds it any more
        shutil.rmtree(gone, ignore_errors=True)

    def _take(self, region: SlotRegion, name: str, writer: Life) -> None:
        path = os.path.join(self.directory, name)
        file = None if writer in self._barred else open_whole(path, verify=False)
        with contextlib.suppress(OSError):
            os.unlink(path)
        if file is not None:
            region.bring(msgspec.msgpack.decode(file.note, type=list[int]), file.payload)


class FileTransferEngine(HostEngine):
    """One instance's data plane over `directory`.  Raises TransportError if it cannot be used."""

    kind = "file"

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        below = os.path.join(tempfile.gettempdir(), f"epd-rows-{os.getuid()}")
        self._directory = os.path.abspath(its.directory or below)
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="epd-file")
        self._inboxes: dict[str, FileInbox] = {}  # by locator
        self._barred: set[Life] = set()
        self._described: dict[str, bytes] = {}  # regions of peers, as they said themselves
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise self._unusable(error) from None

    @property
    def domain(self) -> str:
        """A token that lies in the directory: who reads the same one shares it."""
        path = os.path.join(self._directory, NAME_OF_DIRECTORY)
        mine = f"{path}.{secrets.token_hex(8)}"
        try:
            if not os.path.exists(path):
                with open(mine, "x", encoding="ascii") as file:
                    file.write(secrets.token_hex(16))
                with contextlib.suppress(FileExistsError):
                    os.link(mine, path)  # appears whole, and once
                os.unlink(mine)
            with open(path, encoding="ascii") as file:
                return file.read(64)
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> TransportError:
        return TransportError(
            f"the shared directory {self._directory} cannot be used: {error.strerror}; name one "
            "that all instances may write to"
        )

    def _sweep(self) -> None:
        """Remove what earlier lives of this instance left."""
        for name in os.listdir(self._directory):
            if re.fullmatch(rf"epd-{re.escape(self._life[0])}-[0-9]+-[^/]+\.region(\.gone)?", name):
                shutil.rmtree(os.path.join(self._directory, name), ignore_errors=True)

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """A directory of its own, and memory for what is written within this process."""
        nbytes = check_shape(name, num_slots, slot_nbytes)
        remote = self._make_directory(self._region_ids.new(name), num_slots, slot_nbytes)
        region = SlotRegion(remote, anonymous(nbytes), by_reference=by_reference)
        self._attach(region, remote)
        self._own[remote.region_id] = region
        return region

    def expose(self, region: SlotRegion) -> RemoteRegion:
        own = region.remote
        remote = self._make_directory(own.region_id, own.num_slots, own.slot_nbytes)
        self._attach(region, remote)
        return remote

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        super().conceal(region, remote)
        inbox = self._inboxes.pop(remote.locator, None)
        if inbox is not None:
            region.inboxes.remove(inbox)
            inbox.remove()

    def _make_directory(self, name: str, num_slots: int, slot_nbytes: int) -> RemoteRegion:
        instance_id, epoch = self._life
        locator = f"epd-{instance_id}-{epoch}-{name}-{secrets.token_hex(4)}.region"
        if not NAME.fullmatch(locator):
            raise TransportError(f"region name {name!r} cannot be part of a file name")
        remote = self._remote(name, locator, num_slots, slot_nbytes)
        path = os.path.join(self._directory, locator)
        try:
            os.mkdir(path, mode=0o700)
            description = memoryview(msgspec.msgpack.encode(remote))
            write_whole(
                os.path.join(path, DESCRIPTION), b"", [description], checksum=True, durable=False
            )
        except OSError as error:
            raise TransportError(f"region {path} cannot be made: {error.strerror}") from None
        return remote

    def _attach(self, region: SlotRegion, remote: RemoteRegion) -> None:
        path = os.path.join(self._directory, remote.locator)
        inbox = FileInbox(path, self._barred)
        self._inboxes[remote.locator] = inbox
        region.inboxes.append(inbox)

    async def _write(self, write: Write) -> WriteOutcome:
        """One file, written on a thread."""
        checksum = await asyncio.get_running_loop().run_in_executor(self._threads, self._put, write)
        return Written(write.nbytes, checksum)

    def _put(self, write: Write) -> int:
        """Gives the checksum.  Raises WriteRefused."""
        target = write.target
        try:
            directory = self._served(target)
            instance_id, epoch = self._life
            name = f"{time.time_ns():020d}-{instance_id}-{epoch}-{secrets.token_hex(4)}.rows"
            path = os.path.join(directory, name)
            checksum = write_whole(
                path, msgspec.msgpack.encode(write.slots), write.views,
                checksum=self._copier.checksums, durable=False,
            )  # fmt: skip
            try:
                self._served(target)
            except WriteRefused:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except OSError as error:
            raise WriteRefused(
                f"{target.locator} of {target.instance_id}: {error.strerror}"
            ) from None
        return checksum

    def _served(self, target: RemoteRegion) -> str:
        """The directory of the region.  Raises WriteRefused unless it is as described."""
        if not NAME.fullmatch(target.locator):
            raise WriteRefused(f"{target.locator!r} is not the name of a shared directory")
        path = os.path.join(self._directory, target.locator)
        description = os.path.join(path, DESCRIPTION)
        known = self._described.get(target.locator)  # it never changes, but it goes when revoked
        if known is None and (found := open_whole(description, verify=True)) is not None:
            known = self._described[target.locator] = bytes(found.payload)
        if known != msgspec.msgpack.encode(target) or not os.path.exists(description):
            self._described.pop(target.locator, None)
            raise WriteRefused(
                f"region {target.region_id!r} of {target.instance_id}:{target.epoch} is not in "
                f"{self._directory}: it was revoked, or its owner uses another directory"
            )
        if os.path.exists(os.path.join(path, _mark(self._life))):
            raise WriteRefused(f"{target.instance_id} has fenced this instance")
        return path

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """Bar that life; its files count for nothing from now on.  Always True."""
        self._barred.add((peer.instance_id, peer.epoch))
        for inbox in self._inboxes.values():
            with contextlib.suppress(OSError):
                mark = os.path.join(inbox.directory, _mark((peer.instance_id, peer.epoch)))
                os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return True

    async def close(self) -> bool:
        drained = await super().close()
        self._threads.shutdown(wait=False)
        return drained


def _mark(life: Life) -> str:
    return f"{life[0]}-{life[1]}.barred"
