"""What is written from where it lies on a device: rows, and slots that lie scattered."""

from __future__ import annotations

from collections.abc import Sequence

from epd.messages import RemoteRegion
from epd.transport.base import Buffer, Reference
from epd.transport.cuda.device import is_on_device, is_scattered
from epd.transport.cuda.queue import scattered
from epd.transport.host_engine import HostEngine
from epd.transport.region import Piece, WriteRefused, byte_views, check_fit


class DeviceSources(HostEngine):
    """The base of engines that take them."""

    def _views(self, source: Sequence[Buffer]) -> list[Buffer]:
        """Buffers of the host's or the device's memory, or what is gathered from there."""
        views: list[Buffer] = []
        for given in source:
            raw = given.holder.raw() if isinstance(given, Reference) else given
            views += [raw] if is_on_device(raw) or is_scattered(raw) else byte_views([raw])
        return views

    def _pieces(
        self, views: list[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> list[Piece]:
        """None, if slot goes to slot."""
        source = scattered(views)
        if source is None:
            return super()._pieces(views, target, slots)
        if len(views) > 1 or source.slot_nbytes != target.slot_nbytes:
            size = f"slots of {source.slot_nbytes} bytes"
            raise WriteRefused(f"{size} are written alone, and into some of their size")
        check_fit(source.nbytes, target, slots)
        return []
