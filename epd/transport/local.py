"""Data plane within one process: a write is a copy, or not even that.

`LocalMemory` is the process's table of regions, one object that the composition root gives to every
engine of the process.  A region of any backend may be listed there, so a producer that happens to
live with its consumer finds it and need not take the long way.  Regions allocated `by_reference`
take the producer's buffers as deposits: the hop costs no copy, and the producer must not change
those buffers afterwards (encoded rows never change).

Nobody here can be stalled half-way without the process being so too: outcomes are always definite.
A fence is one all the same: it waits for the peer's copies in flight and bars it from then on."""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
from collections.abc import Sequence

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Life, Reference, Region, WriteFailed, WriteOutcome, Written
from epd.transport.host import this_host_id
from epd.transport.own_memory import OwnMemory
from epd.transport.region import (
    Piece,
    RegionKey,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    key_of,
    only_reference,
    plan,
)

CLOSE_TIMEOUT_S = 5.0
FENCE_TIMEOUT_S = 1.0


class LocalMemory:
    """The regions of one process, who writes into them now, and who is barred."""

    def __init__(self) -> None:
        self._regions: dict[RegionKey, SlotRegion] = {}
        self._barred: set[tuple[Life, Life]] = set()  # (owner, writer)
        self._writes: dict[tuple[Life, Life], set[asyncio.Future[int]]] = {}

    def add(self, region: SlotRegion) -> None:
        self._regions[key_of(region.remote)] = region

    def remove(self, region: SlotRegion) -> None:
        self._regions.pop(key_of(region.remote), None)

    def find(self, target: RemoteRegion) -> SlotRegion | None:
        """The region that the descriptor names, if it lives in this process."""
        region = self._regions.get(key_of(target))
        return region if region is not None and region.remote == target else None

    def listed(self, target: RemoteRegion) -> SlotRegion | None:
        """Likewise, by whichever transport the descriptor is."""
        return self._regions.get(key_of(target))

    def of(self, owner: Life) -> list[SlotRegion]:
        return [region for key, region in self._regions.items() if key[:2] == owner]

    def bar(self, owner: Life, writer: Life) -> None:
        self._barred.add((owner, writer))

    def is_barred(self, owner: Life, writer: Life) -> bool:
        return (owner, writer) in self._barred

    def writes(self, owner: Life, writer: Life) -> set[asyncio.Future[int]]:
        """Copies of `writer` into memory of `owner` that have not ended."""
        return self._writes.get((owner, writer), set())

    def track(self, owner: Life, writer: Life, write: asyncio.Future[int]) -> None:
        pair = (owner, writer)
        self._writes.setdefault(pair, set()).add(write)

        def ended(future: asyncio.Future[int]) -> None:
            self._writes[pair].discard(future)
            if not self._writes[pair]:
                del self._writes[pair]

        write.add_done_callback(ended)


class LocalTransferEngine(OwnMemory):
    """One instance's data plane towards instances of its own process."""

    kind = "local"

    def __init__(self, its: BackendSettings, memory: LocalMemory) -> None:
        super().__init__(its)
        self._memory = memory

    @property
    def domain(self) -> str:
        return f"{this_host_id()}:{os.getpid()}"

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Anonymous memory, zeroed; pages that are only ever deposited to cost nothing."""
        nbytes = check_shape(name, num_slots, slot_nbytes)
        remote = self._remote(self._region_ids.new(name), "", num_slots, slot_nbytes)
        region = SlotRegion(remote, memoryview(mmap.mmap(-1, nbytes)), by_reference=by_reference)
        self._memory.add(region)
        return region

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """Copy or deposit; the outcome is always definite.  See `TransferEngine.write`."""
        try:
            region = self._writable(target)
            region.check_writer(self._life, slots)
            if (reference := only_reference(source)) is not None:
                return self._hand_on(region, reference, slots)
            views = byte_views(source)
            pieces = plan(views, target, slots)
            checksum = await self._copy(region, pieces)
            if region.revoked:
                raise WriteRefused(f"region {target.region_id!r} was revoked meanwhile")
            if region.by_reference:
                self._writable(target)  # a fence may have come while the sum was computed
                region.deposit(slots, views)
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        return Written(sum(view.nbytes for view in views), checksum)

    async def settle(self, peer: Address) -> bool:
        """Wait for our copies in flight to that peer."""
        owner = (peer.instance_id, peer.epoch)
        writes = self._memory.writes(owner, self._life)
        if not writes:
            return True
        _, pending = await asyncio.wait(set(writes), timeout=FENCE_TIMEOUT_S)
        return not pending

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """Bar this life of the peer from our regions and wait for its copies in flight."""
        writer = (peer.instance_id, peer.epoch)
        self._memory.bar(self._life, writer)
        writes = self._memory.writes(self._life, writer)
        if writes:
            await asyncio.wait(set(writes), timeout=FENCE_TIMEOUT_S)
        return not self._memory.writes(self._life, writer)

    def revoke(self, region: Region) -> None:
        """Unlist the region; a copy in flight ends in memory that nobody reads."""
        if isinstance(region, SlotRegion):
            self._memory.remove(region)
            region.release()

    async def close(self) -> bool:
        """Wait for own writes, revoke own regions.  Idempotent."""
        self._closed = True
        drained = await self._copier.settle(CLOSE_TIMEOUT_S)
        for region in self._memory.of(self._life):
            self.revoke(region)
        self._copier.close()
        return drained

    def _writable(self, target: RemoteRegion) -> SlotRegion:
        region = self._memory.find(target)
        if region is None or self._closed:
            raise WriteRefused(
                "the engine is closed"
                if self._closed
                else f"region {target.region_id!r} of {target.instance_id}:{target.epoch} "
                "is not in this process: it was revoked, or its owner restarted"
            )
        if self._memory.is_barred((target.instance_id, target.epoch), self._life):
            raise WriteRefused(f"{target.instance_id} has fenced this instance")
        return region

    def _hand_on(
        self, region: SlotRegion, reference: Reference, slots: Sequence[int]
    ) -> WriteOutcome:
        """No byte moves, so there is nothing to sum up."""
        if not region.by_reference:
            raise WriteRefused(f"region {region.remote.region_id!r} takes no references")
        region.check_write(
            region.remote.slot_nbytes, region.remote.num_slots, slots, reference.nbytes
        )
        region.deposit(slots, [reference])
        return Written(reference.nbytes, 0)

    async def _copy(self, region: SlotRegion, pieces: Sequence[Piece]) -> int:
        if region.by_reference:
            return await self._copier.copy(None, pieces) if self._copier.checksums else 0
        owner = (region.remote.instance_id, region.remote.epoch)
        track = functools.partial(self._memory.track, owner, self._life)
        return await self._copier.copy(region.buffer, pieces, track)
