"""Data plane over plain TCP: the portable way between hosts.

The writer announces a write and pours its buffers into the socket.  The owner checks region, epoch
and slots, reads straight into the slots, and answers with the checksum of what has landed.  One
connection per pair carries any number of writes, one payload after the other.

Outcomes.  Nothing was sent, or the owner refused: `WriteFailed`.  The owner's answer: `Written`.
The connection broke, or made no progress, after the first byte: `WriteUnknown`; bytes in the
owner's socket buffer may still land.  `fence` ends the doubt from either side.  An owner severs and
bars the writer, at once and whatever that writer does: no process needs to be dead.  A writer asks
the owner, which severs the old connections before it answers.
"""

from __future__ import annotations

import asyncio
import functools

from epd.messages import Address
from epd.transport.backend import BackendSettings
from epd.transport.base import Life, WriteFailed, WriteOutcome, WriteUnknown, Written
from epd.transport.host import is_process_dead, this_host_id
from epd.transport.host_engine import Write
from epd.transport.linked.engine import LinkedEngine
from epd.transport.linked.frames import Declined, Done, WriteFrame
from epd.transport.linked.wire import Wire, WireLost
from epd.transport.region import SlotRegion, WriteRefused, runs

STALL_TIMEOUT_S = 10.0  # the peer takes no byte
ANSWER_TIMEOUT_S = 30.0  # after the last byte: what was before it in the queue, and the checksum


class TcpTransferEngine(LinkedEngine):
    """One instance's data plane over TCP."""

    kind = "tcp"

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._stall_timeout_s = STALL_TIMEOUT_S
        self._answer_timeout_s = ANSWER_TIMEOUT_S
        self._doubts: dict[Life, set[str]] = {}  # peers and locators of writes that ended unknown

    # --- writing ----------------------------------------------------------------------------------

    async def _write(self, write: Write) -> WriteOutcome:
        target, checksums = write.target, self._copier.checksums
        wire = await self._links.to(write.life, target.locator)
        try:
            async with wire.turn:
                if wire.severed:
                    raise WriteRefused("the connection broke before this write began")
                number, answer = wire.ask()
                wire.post(WriteFrame(number=number, checksum=checksums, **write.announced()))
                await wire.pour(write.views, self._stall_timeout_s)
            checksum = await self._copier.checksum(write.views) if checksums else 0
            said = await self._answer(wire, answer)
        except WireLost as lost:
            self._doubts.setdefault(write.life, set()).add(target.locator)
            return WriteUnknown(f"{target.instance_id}: {lost}")
        if isinstance(said, Declined):
            return WriteFailed(f"{target.instance_id} refused: {said.reason}")
        if said.checksum != checksum:
            return WriteFailed("other bytes landed than were sent: the checksums differ")
        return Written(write.nbytes, checksum)

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
            region = self._granted(frame, wire.peer)
        except WriteRefused as refused:
            answer = Declined(number=frame.number, reason=str(refused))
            wire.discard(frame.nbytes, functools.partial(wire.pay, answer))
            return
        memory = region.buffer
        places = runs(frame.slots, frame.slot_nbytes, frame.nbytes)
        wire.land(
            [memory[offset : offset + length] for offset, length in places],
            functools.partial(self._landed, wire, frame, region),
        )

    def _landed(self, wire: Wire, frame: WriteFrame, region: SlotRegion) -> None:
        if region.revoked or not frame.checksum:
            wire.pay(_verdict(frame, region))
        else:
            views = region.views(frame.slots, frame.nbytes)
            self._answer_later(self._sum_up(wire, frame, region, views))

    async def _sum_up(
        self, wire: Wire, frame: WriteFrame, region: SlotRegion, views: list[memoryview]
    ) -> None:
        wire.pay(_verdict(frame, region, await self._copier.checksum(views)))

    # --- the end of things ------------------------------------------------------------------------

    async def settle(self, peer: Address) -> bool:
        """Wait for our writes in flight, and ask the peer about those that ended in doubt."""
        if not await super().settle(peer):
            return False
        life = (peer.instance_id, peer.epoch)
        for locator in list(self._doubts.get(life, ())):
            if not await self._links.succeed(life, locator):
                return False
            self._doubts.get(life, set()).discard(locator)
        return True

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """Sever and bar that life of the peer; True unless own writes to it are still in doubt."""
        life = (peer.instance_id, peer.epoch)
        self._links.bar(life)
        if has_ended or (host_id == this_host_id() and is_process_dead(pid)):
            self._doubts.pop(life, None)
        for locator in list(self._doubts.get(life, ())):
            if not await self._links.settle(life, locator):
                return False
            self._doubts.get(life, set()).discard(locator)
        self._doubts.pop(life, None)
        return True


def _verdict(frame: WriteFrame, region: SlotRegion, checksum: int = 0) -> Done | Declined:
    """Of a payload that has landed."""
    if region.revoked:
        reason = f"region {frame.region_id!r} was revoked meanwhile"
        return Declined(number=frame.number, reason=reason)
    return Done(number=frame.number, checksum=checksum)
