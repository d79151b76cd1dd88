"""Data plane between processes of one host: the writer copies into the owner's memory.

A region is one segment in /dev/shm.  A peer maps it once per (instance, epoch, region) and keeps
the mapping.  Every write asks first whether the owner still lives and still serves it, so a
descriptor of an earlier life fails instead of landing anywhere.  A revoked or orphaned segment is
unlinked, never reused: a copy that was under way ends in pages that nobody will read.

Outcomes are always definite.  The only mover of bytes is a thread of this process, and a copy that
raised has stopped: that is `WriteFailed` even if some bytes had moved.  `fence` is left with the
owner's question about a silent writer in another process: it is dead when its life lock is free
(see `segment`), and nothing less will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Region, TransportError, WriteFailed, WriteOutcome, Written
from epd.transport.codec import INSTANCE_ID
from epd.transport.copying import SETTLE_TIMEOUT_S
from epd.transport.host import is_process_dead, this_host_id
from epd.transport.own_memory import OwnMemory
from epd.transport.region import (
    RECUT,
    RegionKey,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    key_of,
    plan,
)
from epd.transport.shm.segment import (
    DIRECTORY,
    NAME,
    PREFIX,
    LifeLock,
    Segment,
    SegmentGone,
    is_life_over,
    sweep,
)

CLOSE_TIMEOUT_S = 5.0


class ShmTransferEngine(OwnMemory):
    """One instance's data plane towards other processes of its host.

    Raises TransportError when the directory cannot be used or the epoch is taken.
    """

    kind = "shm"

    def __init__(self, its: BackendSettings, directory: str = DIRECTORY) -> None:
        super().__init__(its)
        self._directory = directory
        self._own: dict[RegionKey, tuple[SlotRegion, Segment]] = {}
        self._mapped: dict[RegionKey, tuple[RemoteRegion, Segment]] = {}
        sweep(f"{PREFIX}{its.instance_id}-", directory)  # what an earlier life left
        self._lock = LifeLock(its.instance_id, its.epoch, directory)

    @property
    def domain(self) -> str:
        """This host, its count of pids, its mount of /dev/shm: containers may have their own."""
        return f"{this_host_id()}:{os.stat(self._directory).st_dev}"

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """A new segment, zeroed, every page touched.  See `TransferEngine.allocate`."""
        nbytes = check_shape(name, num_slots, slot_nbytes)
        region_id = self._region_ids.new(name)
        instance_id, epoch = self._life
        stem = f"{PREFIX}{instance_id}-{epoch}-{region_id}"
        if not NAME.fullmatch(stem):
            raise TransportError(f"region name {name!r} cannot be part of a file name")
        segment = Segment.create(stem, nbytes, self._directory)
        locator = segment.path.rpartition("/")[2]
        remote = self._remote(region_id, locator, num_slots, slot_nbytes)
        region = SlotRegion(remote, segment.memory, by_reference=by_reference)
        self._own[key_of(remote)] = (region, segment)
        return region

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """Copy into the peer's segment; the outcome is always definite."""
        try:
            segment = self._map(target)
            views = byte_views(source)
            pieces = plan(views, target, slots)
            checksum = await self._copier.copy(segment.memory, pieces)
            if not segment.is_linked():
                self._refuse(target)
        except (WriteRefused, SegmentGone) as refused:
            return WriteFailed(str(refused))
        return Written(sum(view.nbytes for view in views), checksum)

    async def settle(self, peer: Address) -> bool:
        """Wait for our copies in flight, to whomever."""
        return await self._copier.settle(SETTLE_TIMEOUT_S)

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """True once that life of the peer is over; lets go of its memory then.

        A peer on another host cannot have mapped ours.
        """
        if host_id and host_id != this_host_id():
            return True
        if not INSTANCE_ID.fullmatch(peer.instance_id):
            return False
        over: bool | None = has_ended
        over = over or is_life_over(peer.instance_id, peer.epoch, pid, self._directory)
        if over is None:  # swept, or closed in good order: then the process has to be gone
            over = is_process_dead(pid)
        if over:
            life = (peer.instance_id, peer.epoch)
            self._unmap(lambda remote: (remote.instance_id, remote.epoch) == life)
        return over

    def revoke(self, region: Region) -> None:
        """Unlink the segment: peers fail from their next write on, also those that mapped it."""
        own = self._own.pop(key_of(region.remote), None)
        if own is not None:
            own[1].unlink()
            own[0].release()
            own[1].close()

    async def close(self) -> bool:
        """Wait for own writes, give all memory back, remove own files.  Idempotent."""
        if self._closed:
            return not self._copier.in_flight
        self._closed = True
        drained = await self._copier.settle(CLOSE_TIMEOUT_S)
        for region, _ in list(self._own.values()):
            self.revoke(region)
        self._unmap(lambda _: True)
        self._copier.close()
        if drained:  # else a stuck thread may still write: peers must not believe us gone
            self._lock.release()
        return drained

    def _map(self, target: RemoteRegion) -> Segment:
        """The peer's segment, mapped now or earlier.  Raises WriteRefused or SegmentGone."""
        if self._closed:
            raise WriteRefused("the engine is closed")
        key = key_of(target)
        if key not in self._mapped:
            self._mapped[key] = (target, self._attach(target))
        known, segment = self._mapped[key]
        if known != target:
            raise WriteRefused(f"region {target.region_id!r} is described differently than before")
        if not segment.is_served():
            self._refuse(target)
        return segment

    def _attach(self, target: RemoteRegion) -> Segment:
        region_id = target.region_id.removesuffix(RECUT)
        stem = f"{PREFIX}{target.instance_id}-{target.epoch}-{region_id}-"
        if target.backend != "shm" or not (
            NAME.fullmatch(target.locator) and target.locator.startswith(stem)
        ):
            raise WriteRefused(f"{target.locator!r} is not the name of a segment of that region")
        stale = [remote for remote, segment in self._mapped.values() if not segment.is_served()]
        self._unmap(lambda remote: remote in stale)
        return Segment.attach(
            target.locator, target.num_slots * target.slot_nbytes, self._directory
        )

    def _refuse(self, target: RemoteRegion) -> NoReturn:
        self._unmap(lambda remote: remote == target)
        raise SegmentGone(
            f"region {target.region_id!r} of {target.instance_id}:{target.epoch} "
            "was revoked, or its owner is dead"
        )

    def _unmap(self, which: Callable[[RemoteRegion], bool]) -> None:
        for key, (remote, segment) in list(self._mapped.items()):
            if which(remote):
                del self._mapped[key]
                segment.close()
