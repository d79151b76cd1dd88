"""Data plane over plain TCP: the portable way between hosts.

The writer announces a write and pours its buffers into the socket; the owner checks region, epoch
and slots, reads straight into the slots, and answers with the checksum of what has landed.  One
connection per pair carries any number of writes, one payload after the other.

Outcomes.  Nothing was sent, or the owner refused: `WriteFailed`.  The owner's answer: `Written`.
The connection broke, or made no progress, after the first byte: `WriteUnknown`; what lies in the
owner's socket buffer may still land.  `fence` ends the doubt from either side.  An owner severs and
bars the writer, at once and whatever that writer does: no process needs to be dead.  A writer asks
the owner, which severs the old connections before it answers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from epd.messages import Address, RemoteRegion
from epd.transport.backend import Backend, BackendSettings
from epd.transport.base import (
    Buffer,
    Region,
    WriteFailed,
    WriteOutcome,
    WriteUnknown,
    Written,
)
from epd.transport.codec import check_instance_id
from epd.transport.copying import Copier
from epd.transport.endpoint import is_tcp
from epd.transport.frames import Declined, Done, WriteFrame
from epd.transport.host import is_process_dead, this_host_id
from epd.transport.host_memory import anonymous
from epd.transport.links import SETTLE_TIMEOUT_S, Life, Links
from epd.transport.region import (
    RegionIds,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    plan,
    runs,
)
from epd.transport.wire import Wire, WireLost

CLOSE_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 10.0  # the peer takes no byte
ANSWER_TIMEOUT_S = 30.0  # after the last byte: what was before it in line, and the checksum


class TcpTransferEngine:
    """One instance's data plane over TCP.

    `host`: where peers can reach this instance.  `secret`: of the cluster; may be empty on
    loopback.  Raises TransportError when the address cannot be used.
    """

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        *,
        checksums: bool = False,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        stall_timeout_s: float = STALL_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        check_instance_id(instance_id)
        self._life: Life = (instance_id, epoch)
        self._stall_timeout_s = stall_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._links = Links(self._life, host, secret, self._on_frame)
        self._copier = Copier(checksums=checksums)
        self._region_ids = RegionIds()
        self._own: dict[str, SlotRegion] = {}
        self._writes: set[asyncio.Task[WriteOutcome]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._doubts: dict[Life, set[str]] = {}  # peers and locators of writes that ended unknown
        self._closed = False

    @property
    def domain(self) -> str:
        return self._links.domain

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Zeroed, resident memory behind this instance's listener."""
        nbytes = check_shape(name, num_slots, slot_nbytes)
        region_id = self._region_ids.new(name)
        remote = RemoteRegion(
            "tcp", *self._life, region_id, self._links.listen(), slot_nbytes, num_slots
        )
        region = SlotRegion(remote, anonymous(nbytes), by_reference=by_reference)
        self._own[region_id] = region
        return region

    def expose(self, region: SlotRegion) -> RemoteRegion:
        """See `Exposes.expose`."""
        own = region.remote
        self._own[own.region_id] = region
        place = self._links.listen()
        return RemoteRegion(
            "tcp", *self._life, own.region_id, place, own.slot_nbytes, own.num_slots
        )

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        """See `Exposes.conceal`."""
        self._own.pop(remote.region_id, None)

    # --- writing ----------------------------------------------------------------------------------

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """See `TransferEngine.write`.  A cancelled caller leaves the write running."""
        try:
            if self._closed:
                raise WriteRefused("the engine is closed")
            if target.backend != "tcp":
                raise WriteRefused(f"a region of {target.backend!r} cannot be reached over TCP")
            views = byte_views(source)
            plan(views, target, slots)
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        task = asyncio.get_running_loop().create_task(self._write(views, target, tuple(slots)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def _write(
        self, views: list[memoryview], target: RemoteRegion, slots: tuple[int, ...]
    ) -> WriteOutcome:
        life = (target.instance_id, target.epoch)
        nbytes = sum(view.nbytes for view in views)
        try:
            wire = await self._links.to(life, target.locator)
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        try:
            async with wire.turn:
                if wire.severed:
                    return WriteFailed("the connection broke before this write began")
                number, answer = wire.ask()
                wire.post(
                    WriteFrame(
                        number, target.region_id, target.slot_nbytes, target.num_slots, slots,
                        nbytes, self._copier.checksums,
                    )
                )  # fmt: skip
                await wire.pour(views, self._stall_timeout_s)
            checksum = await self._copier.checksum(views) if self._copier.checksums else 0
            said = await self._answer(wire, answer)
        except WireLost as lost:
            self._doubts.setdefault(life, set()).add(target.locator)
            return WriteUnknown(f"{target.instance_id}: {lost}")
        if isinstance(said, Declined):
            return WriteFailed(f"{target.instance_id} refused: {said.reason}")
        if said.checksum != checksum:
            return WriteFailed("other bytes landed than were sent: the checksums differ")
        return Written(nbytes, checksum)

    async def _answer(self, wire: Wire, answer: asyncio.Future[Done | Declined]) -> Done | Declined:
        await asyncio.wait((answer,), timeout=self._answer_timeout_s)
        if not answer.done():
            wire.sever()
            raise WireLost(f"no answer for {self._answer_timeout_s:g} s after the last byte")
        return answer.result()

    # --- being written to -------------------------------------------------------------------------

    def _on_frame(self, wire: Wire, frame: object) -> None:
        if not isinstance(frame, WriteFrame):
            wire.sever()
            return
        wire.owe()
        try:
            region = self._granted(frame)
        except WriteRefused as refused:
            answer = Declined(frame.number, str(refused))
            wire.discard(frame.nbytes, functools.partial(wire.pay, answer))
            return
        memory = region.buffer
        places = runs(frame.slots, frame.slot_nbytes, frame.nbytes)
        wire.land(
            [memory[offset : offset + length] for offset, length in places],
            functools.partial(self._landed, wire, frame, region),
        )

    def _granted(self, frame: WriteFrame) -> SlotRegion:
        """The region that the frame means.  Raises WriteRefused."""
        region = self._own.get(frame.region_id)
        if region is None:
            raise WriteRefused(f"region {frame.region_id!r} was revoked or never existed")
        region.check_write(frame.slot_nbytes, frame.num_slots, frame.slots, frame.nbytes)
        return region

    def _landed(self, wire: Wire, frame: WriteFrame, region: SlotRegion) -> None:
        if region.revoked:
            wire.pay(Declined(frame.number, f"region {frame.region_id!r} was revoked meanwhile"))
        elif not frame.checksum:
            wire.pay(Done(frame.number))
        else:
            task = asyncio.get_running_loop().create_task(
                self._sum_up(wire, frame, region, region.views(frame.slots, frame.nbytes))
            )
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _sum_up(
        self, wire: Wire, frame: WriteFrame, region: SlotRegion, views: list[memoryview]
    ) -> None:
        checksum = await self._copier.checksum(views)
        if region.revoked:
            wire.pay(Declined(frame.number, f"region {frame.region_id!r} was revoked meanwhile"))
        else:
            wire.pay(Done(frame.number, checksum))

    # --- the end of things ------------------------------------------------------------------------

    async def checksum(self, views: Sequence[Buffer]) -> int:
        """See `TransferEngine.checksum`: CRC-32."""
        return await self._copier.checksum(byte_views(views))

    async def settle(self, peer: Address) -> bool:
        """Wait for our writes in flight, and ask the peer about those that ended in doubt."""
        begun = set(self._writes)
        if begun and (await asyncio.wait(begun, timeout=SETTLE_TIMEOUT_S))[1]:
            return False
        life = (peer.instance_id, peer.epoch)
        for locator in list(self._doubts.get(life, ())):
            if not await self._links.succeed(life, locator):
                return False
            self._doubts.get(life, set()).discard(locator)
        return True

    async def fence(self, peer: Address, host_id: str, pid: int) -> bool:
        """Sever and bar that life of the peer; True unless own writes to it are still in doubt."""
        life = (peer.instance_id, peer.epoch)
        self._links.bar(life)
        if host_id == this_host_id() and is_process_dead(pid):
            self._doubts.pop(life, None)
        for locator in list(self._doubts.get(life, ())):
            if not await self._links.settle(life, locator):
                return False
            self._doubts.get(life, set()).discard(locator)
        self._doubts.pop(life, None)
        return True

    def revoke(self, region: Region) -> None:
        """Unlist the region; a payload that is arriving ends in memory that nobody reads."""
        own = self._own.get(region.remote.region_id)
        if own is region:
            del self._own[region.remote.region_id]
            own.release()

    async def close(self) -> None:
        """Wait for own writes, sever all connections, revoke own regions.  Idempotent."""
        self._closed = True
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=CLOSE_TIMEOUT_S)
        await self._links.close()
        for region in list(self._own.values()):
            self.revoke(region)
        open_ends = {*self._writes, *self._answering}  # severed: they end now
        if open_ends:
            await asyncio.wait(open_ends, timeout=CLOSE_TIMEOUT_S)
        await self._copier.drain(CLOSE_TIMEOUT_S)
        self._copier.close()


def _make(its: BackendSettings) -> TcpTransferEngine:
    return TcpTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret
    )


BACKEND = Backend(
    "tcp", rank=30, leaves_host=True, make=_make,
    is_offered=lambda endpoint, directory: is_tcp(endpoint),
    domain="none, beyond loopback; on loopback the network namespace",
    offered="if the bus is on tcp",
)  # fmt: skip
