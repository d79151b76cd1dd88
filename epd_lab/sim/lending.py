"""Slots that are lent to a life of a peer: a write into others is declined where it begins."""

from __future__ import annotations

from collections.abc import Sequence

from epd.messages import Address, RemoteRegion
from epd.transport.base import Buffer, Region, WriteFailed, WriteOutcome
from epd.transport.region import SlotRegion, WriteRefused
from epd_lab.sim.transfer import SimTransferEngine


class SimDataPlane(SimTransferEngine):
    """One that asks the owner, as those between hosts do."""

    def guard(self, region: Region) -> None:
        assert isinstance(region, SlotRegion)
        region.lent.guard()

    def lend(self, target: RemoteRegion, slots: Sequence[int], peer: Address, room: str) -> None:
        if (found := self._fabric.region(target)) is not None:
            found[0].lent.lend((peer.instance_id, peer.epoch), room, slots)

    def take_back(self, target: RemoteRegion, room: str) -> None:
        if (found := self._fabric.region(target)) is not None:
            found[0].lent.take_back(room)

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        if (found := self._fabric.region(target)) is not None:
            try:
                found[0].check_writer(self._life, slots)
            except WriteRefused as refused:
                return WriteFailed(str(refused))
        return await super().write(source, target, slots)
