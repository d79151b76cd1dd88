"""What is common to all data planes of this host: one life's regions of one kind, copies, sums."""

from __future__ import annotations

from collections.abc import Sequence

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Life
from epd.transport.codec import check_instance_id
from epd.transport.copying import Copier
from epd.transport.region import RegionIds, byte_views


class OwnMemory:
    """The base of their engines."""

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
