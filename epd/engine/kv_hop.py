"""KV between a GPU and the host memory that the transfer engine can reach.

What is to be sent is gathered on the device and comes down in one piece, both on a stream of their
own: it is final, so it need not wait for the step that is being computed (later layers of the very
same prompt).  Its blocks may be given to others when the call's future has ended.  Blocks that
arrived lie in registered memory (pinned, so that the device reads it itself) and go up into one
piece, which is then scattered into the pool; the landing memory may be written again when the
call's future has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from epd.engine.copies import to_device
from epd.engine.executor import Deferred
from epd.engine.kv_pool import KvPool
from epd.engine.pinned import Arena, register
from epd.engine.streams import KV_OUT, DeviceStreams


class KvHop:
    """Both directions of one device's pool; the methods run on the launch thread."""

    def __init__(self, pool: KvPool, streams: DeviceStreams, leaving_nbytes: int = 0) -> None:
        """`leaving_nbytes`: pinned memory for what is on its way out, reserved here; what does not
        fit is pinned when it leaves, which holds up the launch thread."""
        self._pool = pool
        self._leaving = Arena(leaving_nbytes)
        self._streams = streams
        self._landing = torch.empty(0, 1, dtype=torch.uint8)

    def attach(self, buffer: memoryview) -> None:
        nbytes = self._pool.layout.block_nbytes
        usable = buffer.cast("B")[: buffer.nbytes // nbytes * nbytes]
        self._landing = register(usable, self).view(-1, nbytes)

    def fetch(self, slots: Sequence[int]) -> Deferred[list[memoryview]]:
        """The bytes of slots that are final, in pinned memory of their own."""
        by_slot = self._pool.memory.view(-1, self._pool.layout.slot_nbytes)
        with torch.inference_mode(), torch.cuda.stream(self._streams.kv_out_stream):
            gathered = by_slot.index_select(0, self._index(slots))
            host = self._leaving.take(gathered.shape, torch.uint8)
            if host is None:
                host = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
        return Deferred(lambda: [memoryview(host.numpy()).cast("B")], KV_OUT)

    def land(self, slots: Sequence[int], blocks: Sequence[int]) -> Deferred[None]:
        """Copy what lies in `slots` of the landing memory into `blocks` of the pool."""
        with torch.inference_mode():
            runs = (self._landing[first:last] for first, last in _runs(slots))
            arrived = self._streams.upload(*runs)
            self._pool.memory.index_copy_(0, self._index(blocks), arrived)
        return Deferred(lambda: None)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(list(blocks), torch.int64, self._streams.device)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours as `(first, behind the last)`, in order: one copy for each."""
    first = last = slots[0]
    for slot in slots[1:]:
        if slot != last + 1:
            yield first, last + 1
            first = slot
        last = slot
    yield first, last + 1
