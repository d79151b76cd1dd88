"""What data planes between processes share: one life's memory, and writes that outlive callers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Life, Region, WriteFailed, WriteOutcome
from epd.transport.codec import check_instance_id
from epd.transport.copying import SETTLE_TIMEOUT_S, Copier
from epd.transport.host_memory import anonymous
from epd.transport.linked.frames import Announced
from epd.transport.linked.links import Links
from epd.transport.linked.wire import Wire
from epd.transport.region import (
    Piece,
    RegionIds,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    plan,
)

CLOSE_TIMEOUT_S = 5.0


class Write(NamedTuple):
    """Buffers, what of them goes where, and the region and slots that are meant."""

    views: list[Buffer]
    pieces: list[Piece]
    target: RemoteRegion
    slots: tuple[int, ...]

    @property
    def life(self) -> Life:
        """Of the region's owner."""
        return self.target.instance_id, self.target.epoch

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)

    def announced(self) -> dict[str, Any]:
        """As an `Announced` says it."""
        its = self.target
        return {
            "region_id": its.region_id,
            "slot_nbytes": its.slot_nbytes,
            "num_slots": its.num_slots,
            "slots": self.slots,
            "nbytes": self.nbytes,
        }


class OwnMemory:
    """What is common to all: one life's regions of one kind, copies and sums."""

    kind: str  # of its regions' descriptors

    def __init__(self, its: BackendSettings) -> None:
        check_instance_id(its.instance_id)
        self._life: Life = (its.instance_id, its.epoch)
        self._copier = Copier(checksums=its.checksums)
        self._region_ids = RegionIds()
        self._closed = False

    def _remote(
        self, region_id: str, locator: str, num_slots: int, slot_nbytes: int
    ) -> RemoteRegion:
        return RemoteRegion(
            backend=self.kind,
            instance_id=self._life[0],
            epoch=self._life[1],
            region_id=region_id,
            locator=locator,
            slot_nbytes=slot_nbytes,
            num_slots=num_slots,
        )

    async def checksum(self, views: Sequence[Buffer]) -> int:
        """See `TransferEngine.checksum`: CRC-32."""
        return await self._copier.checksum(byte_views(views))


class HostEngine(OwnMemory, ABC):
    """One instance's data plane of one kind; a subclass says how bytes move and what a fence is."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._own: dict[str, SlotRegion] = {}  # by region id
        self._writes: set[asyncio.Task[WriteOutcome]] = set()
        self._answers: set[asyncio.Task[None]] = set()  # to peers, which take time
        self._links: Links | None = None

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """See `TransferEngine.write`.  A cancelled caller leaves the write running."""
        try:
            if self._closed:
                raise WriteRefused("the engine is closed")
            if target.backend != self.kind:
                raise WriteRefused(f"a region of {target.backend!r} is not reached by {self.kind}")
            views = self._views(source)
            pieces = self._pieces(views, target, slots)
            work = self._write(Write(views, pieces, target, tuple(slots)))
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        task = asyncio.get_running_loop().create_task(_outcome(work))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    def _views(self, source: Sequence[Buffer]) -> list[Buffer]:
        """What is written, to be cut into pieces.  Raises WriteRefused."""
        return byte_views(source)

    def _pieces(
        self, views: list[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> list[Piece]:
        """What goes where.  Raises WriteRefused."""
        return plan(views, target, slots)

    @abstractmethod
    def _write(self, write: Write) -> Coroutine[Any, Any, WriteOutcome]:
        """Raises WriteRefused, now or when it is awaited: no byte has moved."""

    def _granted(self, frame: Announced, writer: Life) -> SlotRegion:
        """The own region that a peer means to write to.  Raises WriteRefused."""
        region = self._own.get(frame.region_id)
        if region is None:
            raise WriteRefused(f"region {frame.region_id!r} was revoked or never existed")
        region.check_write(frame.slot_nbytes, frame.num_slots, frame.slots, frame.nbytes)
        region.check_writer(writer, frame.slots)
        return region

    def _answer_later(self, work: Coroutine[Any, Any, None]) -> None:
        """What a peer waits for and the loop cannot do at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def settle(self, peer: Address) -> bool:
        """Wait for our writes in flight, to whomever."""
        begun = set(self._writes)
        return not begun or not (await asyncio.wait(begun, timeout=SETTLE_TIMEOUT_S))[1]

    def revoke(self, region: Region) -> None:
        """Unlist the region; a payload that is arriving ends in memory that nobody reads."""
        own = self._own.get(region.remote.region_id)
        if own is region:
            self.conceal(own, own.remote)
            own.release()

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        self._own.pop(remote.region_id, None)

    async def close(self) -> None:
        """Wait for own writes, sever what connects, revoke own regions.  Idempotent."""
        self._closed = True
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=CLOSE_TIMEOUT_S)
        if self._links is not None:
            await self._links.close()
        for region in list(self._own.values()):
            self.revoke(region)
        if open_ends := {*self._writes, *self._answers}:  # severed: they end now
            await asyncio.wait(open_ends, timeout=CLOSE_TIMEOUT_S)
        await self._copier.settle(CLOSE_TIMEOUT_S)
        self._copier.close()


async def _outcome(write: Coroutine[Any, Any, WriteOutcome]) -> WriteOutcome:
    try:
        return await write
    except WriteRefused as refused:
        return WriteFailed(str(refused))


class LinkedEngine(HostEngine):
    """One that asks peers over `Links`.  Raises TransportError when the address cannot be used."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._links: Links = Links(self._life, its.host, its.secret, self._on_frame)

    @property
    def domain(self) -> str:
        return self._links.domain

    @property
    def refused(self) -> Counter[str]:
        return self._links.refused

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Zeroed, resident memory behind this instance's listener."""
        memory = anonymous(check_shape(name, num_slots, slot_nbytes))
        region_id = self._region_ids.new(name)
        remote = self._remote(region_id, self._locator(memory), num_slots, slot_nbytes)
        region = self._own[region_id] = SlotRegion(remote, memory, by_reference=by_reference)
        return region

    def expose(self, region: SlotRegion) -> RemoteRegion:
        own = region.remote
        locator = self._locator(region.buffer)
        self._own[own.region_id] = region
        return self._remote(own.region_id, locator, own.num_slots, own.slot_nbytes)

    def _locator(self, memory: memoryview) -> str:
        """Where peers ask for what lies here."""
        return self._links.listen()

    @abstractmethod
    def _on_frame(self, wire: Wire, frame: object) -> None:
        """What a peer says."""
