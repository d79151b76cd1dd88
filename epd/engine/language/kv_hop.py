"""KV between a GPU and the memory that the transfer engine can reach.

A transport that reads the device's memory copies what is to be sent from where it lies (`source`).
For others it is gathered on the device and comes down in one piece.  A stream of its own does that:
KV is final, so it waits for no later layers.  Its blocks may be given to others when the call's
future has ended.  Blocks that arrived lie in the pool itself, or in registered memory, which the
device reads itself, and go up into one piece.  They are then scattered into the pool, beside steps
that are computed: no step uses them yet.  The landing memory may be written again when the call's
future has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epd.engine.base import Buffer
from epd.engine.device.copies import to_device, to_host
from epd.engine.device.executor import Deferred
from epd.engine.device.pinned import Arena, Registered, register
from epd.engine.device.streams import KV_IN, KV_OUT, DeviceStreams
from epd.engine.language.kv_pool import KvPool
from epd.groups.device.kv_heads import put_blocks, take_heads
from epd.groups.device.state_moves import Piece, put_states, take_states
from epd.shares import neighbours


class KvHop:
    """Both directions of one device's pool; the methods run on the launch thread."""

    def __init__(self, pool: KvPool, streams: DeviceStreams, leaving_nbytes: int = 0) -> None:
        """`leaving_nbytes`: pinned memory for what is on its way out, reserved here; what does not
        fit is pinned when it leaves, which holds up the launch thread."""
        self._pool = pool
        self._leaving = Arena(leaving_nbytes)
        self._streams = streams
        self._landing = torch.empty(0, 1, dtype=torch.uint8)
        self._registered = Registered()

    def attach(self, buffer: memoryview) -> None:
        nbytes = self._pool.layout.block_nbytes
        usable = buffer[: buffer.nbytes // nbytes * nbytes]
        self._landing = register(usable, self._registered).view(-1, nbytes)

    def attach_rows(self, buffer: memoryview) -> None:
        """The device reads what arrives there."""
        register(buffer, self._registered)

    def detach(self) -> None:
        self._landing, self._registered = torch.empty(0, 1, dtype=torch.uint8), Registered()

    def source(self, slots: Sequence[int]) -> PoolSlots:
        """Slots that are final, where they lie, for who copies them from there."""
        memory, size = self._pool.memory, self._pool.layout.slot_nbytes
        return PoolSlots(memory, np.array(slots, np.uint64) * size + memory.data_ptr(), size)

    def fetch(self, slots: Sequence[int]) -> Deferred[list[memoryview]]:
        """The bytes of slots that are final, in pinned memory of their own."""
        by_slot = self._pool.memory.view(-1, self._pool.layout.slot_nbytes)
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_out_stream):
            gathered = by_slot.index_select(0, self._index(slots))
            host = self._leaving.pinned_like(gathered)
            host.copy_(gathered, non_blocking=True)
        return Deferred(lambda: [memoryview(host.numpy()).cast("B")], KV_OUT)

    def fetch_heads(
        self, slots: Sequence[int], heads: range, *, in_place: bool
    ) -> Deferred[list[Buffer]]:
        """Those of slots that are final, in memory of their own: of the device, if `in_place`."""
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_out_stream):
            taken = take_heads(self._pool, self._index(slots), heads)
            return _leaving(taken, in_place=in_place)

    def fetch_state(
        self, blocks: Sequence[int], heads: range, *, in_place: bool
    ) -> Deferred[list[Buffer]]:
        """Those of a state that is final, likewise."""
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_out_stream):
            taken = take_states(self._pool, self._index(blocks), heads)
            return _leaving(taken, in_place=in_place)

    def land_state(
        self, memory: Buffer, slots: Sequence[int], blocks: Sequence[int], pieces: Sequence[Piece]
    ) -> Deferred[None]:
        """What lies of a state in `slots` of this memory becomes that in `blocks`."""
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_in_stream):
            landed = self._landed(memory, slots).view(-1)
            put_states(self._pool, self._index(blocks), landed, pieces)
        return Deferred(lambda: None, KV_IN)

    def land(
        self, memory: Buffer, slots: Sequence[int], blocks: Sequence[int], *, by_head: bool = False
    ) -> Deferred[None]:
        """Copy what lies in `slots` of this memory into `blocks` of the pool."""
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_in_stream):
            targets, landed = self._index(blocks), self._landed(memory, slots)
            if by_head:
                put_blocks(self._pool, targets, landed)
            else:
                self._pool.memory.index_copy_(0, targets, landed)
        return Deferred(lambda: None, KV_IN)

    def _landed(self, memory: Buffer, slots: Sequence[int]) -> torch.Tensor:
        """A copy: of the landing memory, or of the pool, which is the device's."""
        if not isinstance(memory, memoryview):
            return self._pool.memory.index_select(0, self._index(slots))
        runs = (self._landing[first:last] for first, last in neighbours(slots))
        return self._streams.upload(*runs)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(list(blocks), torch.int64, self._streams.device)


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Slots of a pool as a transport copies them (`epd.transport.cuda.device.Scattered`)."""

    pool: torch.Tensor  # kept while a write reads it
    addresses: np.ndarray[Any, np.dtype[np.uint64]]
    slot_nbytes: int

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.slot_nbytes


def _leaving(taken: torch.Tensor, *, in_place: bool) -> Deferred[list[Buffer]]:
    """On its way out, from the current stream: in memory of the device, if `in_place`."""
    if in_place:
        return Deferred(lambda: [taken.view(-1)], KV_OUT)
    host = to_host(taken)
    return Deferred(lambda: [memoryview(host.numpy()).cast("B")], KV_OUT)
