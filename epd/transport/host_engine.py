"""What data planes between processes share: writes that outlive their callers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Life, Region, WriteFailed, WriteOutcome
from epd.transport.copying import SETTLE_TIMEOUT_S
from epd.transport.own_memory import OwnMemory
from epd.transport.region import Piece, SlotRegion, WriteRefused, byte_views, plan

if TYPE_CHECKING:
    from epd.transport.linked.frames import Announced
    from epd.transport.linked.links import PeerLinks

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
        """The fields of an `Announced`."""
        its = self.target
        return {
            "region_id": its.region_id,
            "slot_nbytes": its.slot_nbytes,
            "num_slots": its.num_slots,
            "slots": self.slots,
            "nbytes": self.nbytes,
        }


class HostEngine(OwnMemory, ABC):
    """One instance's data plane of one kind; a subclass has the move of bytes and the fence."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._own: dict[str, SlotRegion] = {}  # by region id
        self._writes: set[asyncio.Task[WriteOutcome]] = set()
        self._answers: set[asyncio.Task[None]] = set()  # to peers, which take time
        self._links: PeerLinks | None = None

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

    async def close(self) -> bool:
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
        drained = await self._copier.settle(CLOSE_TIMEOUT_S)
        self._copier.close()
        return drained and not self._writes


async def _outcome(write: Coroutine[Any, Any, WriteOutcome]) -> WriteOutcome:
    try:
        return await write
    except WriteRefused as refused:
        return WriteFailed(str(refused))
