"""NIXL's agents between GPUs: regions lie in device memory, as peers and the engine have them.

A source is final when it is written: the step that made it is waited for before.  A write that is
done has passed on the device.  As with host memory, nothing stops one.
"""

from __future__ import annotations

import asyncio
import functools

from epd.transport.backend import BackendSettings
from epd.transport.base import Region, TransportError
from epd.transport.cuda.device import DeviceError, DeviceMemory, index_of, place_of
from epd.transport.cuda.driver import CudaDevice, missing
from epd.transport.cuda.queue import scattered, sum_of
from epd.transport.cuda.sources import DeviceSources
from epd.transport.host_engine import Write
from epd.transport.linked.leave import WritePiece
from epd.transport.nixl.backend import NixlTransferEngine
from epd.transport.nixl.library import Agent
from epd.transport.region import SlotRegion, WriteRefused, check_shape, recut


class NixlDeviceEngine(DeviceSources, NixlTransferEngine):
    """One instance's data plane over NIXL, which computes on a GPU.  Raises TransportError."""

    expose = None  # type: ignore[assignment]  # host memory has a mirror instead

    def __init__(self, its: BackendSettings, device: CudaDevice) -> None:
        self._device, self._index = device, index_of(its.device)
        device.enter()  # where a context is current, UCX moves memory of its device
        super().__init__(its)

    def _enter(self) -> None:
        self._device.enter()

    def _moved_by(self, its: BackendSettings) -> Agent:
        self._agent = super()._moved_by(its)
        return self._agent

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Device memory; `by_reference` changes nothing: nobody deposits here."""
        made = _plain(self._device, check_shape(name, num_slots, slot_nbytes))
        return self.register(name, made, slot_nbytes)

    def register(self, name: str, memory: DeviceMemory, slot_nbytes: int) -> SlotRegion:
        """See `OnDevice`."""
        num_slots = memory.nbytes // slot_nbytes
        word = self._agent.register(memory.address, memory.nbytes, self._index)
        place = f"{self._links.listen()}/{word}/{memory.address:x}@{self._index}"
        remote = self._remote(self._region_ids.new(name), place, num_slots, slot_nbytes)
        region = SlotRegion(remote, memory.whole[: num_slots * slot_nbytes], by_reference=False)
        self._own[remote.region_id] = region
        return region

    def recut(self, region: Region, num_parts: int) -> SlotRegion:
        assert isinstance(region, SlotRegion)
        fine = recut(region, num_parts)
        self._agent.share(place_of(region.buffer)[0])
        self._own[fine.remote.region_id] = fine
        return fine

    async def _sum(self, write: Write) -> int:
        sums = functools.partial(sum_of, self._device, write.views)
        return await asyncio.get_running_loop().run_in_executor(self._threads, sums)

    def _moves(self, write: Write, base: int) -> list[WritePiece]:
        if (source := scattered(write.views)) is not None:
            size = source.slot_nbytes
            pairs = zip(source.addresses.tolist(), write.slots, strict=False)
            return [WritePiece(at, base + slot * size, size, self._index) for at, slot in pairs]
        moves, kinds = [], set()
        for offset, view in write.pieces:
            address, on_device = place_of(view)
            kinds.add(on_device)
            device = self._index if on_device else None
            moves.append(WritePiece(address, base + offset, view.nbytes, device))
        if len(kinds) > 1:
            raise WriteRefused("one write takes rows of the host or of the device")
        return moves


def _plain(device: CudaDevice, nbytes: int) -> DeviceMemory:
    try:
        return device.allocate_plain(nbytes)
    except DeviceError as error:
        raise TransportError(
            f"{nbytes / 2**20:.1f} MiB of {device.name} cannot be had ({error}): lower --kv-nbytes "
            "or prefill.pool_nbytes, or use another --transport"
        ) from None


def memory(device: str, nbytes: int) -> DeviceMemory:
    """Of a device, zeroed, for `register`.  Raises TransportError."""
    return _plain(CudaDevice(index_of(device)), nbytes)


def make(its: BackendSettings) -> NixlDeviceEngine:
    if reason := missing():
        raise TransportError(f"transport nixl cannot be used on a GPU: {reason}")
    return NixlDeviceEngine(its, CudaDevice(index_of(its.device)))
