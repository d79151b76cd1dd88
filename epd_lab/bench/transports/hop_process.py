"""The receiving half of `epd bench hop`: a process that owns the memory and reports when it is
usable.

Usable means: this process holds views of all the bytes, every page of them is mapped, and the tag
at both ends is that of the item.  The time of that is taken here; `perf_counter` is the host's
monotonic clock, so it compares with the sender's.  What follows is not part of the latency: a look
at a byte of every page, which must be the ones that were sent.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import uvloop

from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS
from epd.transport.base import Region, TransferEngine
from epd.transport.host_memory import address_of, anonymous
from epd.transport.mooncake.library import Library
from epd_lab.bench.transports.words import answer_all

PAGE = 4096
TAG_NBYTES = 8


def fingerprint(rows: np.ndarray) -> int:
    """Of one byte per page, tags left out."""
    return int(rows[PAGE // 2 :: PAGE].sum(dtype=np.uint64))


def backend_of(way: str) -> str:
    """`file-medium` is the file backend, used in another way."""
    return way.partition("-")[0]


class Receiving:
    """Engines and regions by way."""

    def __init__(self) -> None:
        self._engines: dict[str, TransferEngine] = {}
        self._regions: dict[str, Region] = {}
        self._raw: dict[int, memoryview] = {}
        self._library: Library | None = None

    async def allocate(self, way: str, directory: str, slots: int, nbytes: int) -> Any:
        if way == "mooncake-raw":
            return self._allocate_raw(slots * nbytes)
        settings = BackendSettings(f"receiver-{way}", time.time_ns(), directory=directory)
        engine = self._engines[way] = BACKENDS[backend_of(way)].make(settings)
        region = self._regions[way] = engine.allocate("rows", slots, nbytes, by_reference=True)
        return [getattr(region.remote, name) for name in region.remote.__struct_fields__]

    def _allocate_raw(self, nbytes: int) -> list[Any]:
        library = self._library = Library.acquire("127.0.0.1")
        memory = anonymous(nbytes)
        address = address_of(memory)
        library.register(address, nbytes)
        self._raw[address] = memory
        return [library.host, library.port, address]

    def rest(self) -> None:
        """Nothing is asked but the CPU seconds that come with every answer."""

    async def release(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        for address in self._raw:
            assert self._library is not None
            self._library.unregister(address)
        if self._library is not None:
            self._library.give_back()
        self._engines, self._regions, self._raw, self._library = {}, {}, {}, None

    def use(self, way: str, slot: int, nbytes: int, tag: int, expected: int) -> int:
        views = self._regions[way].views((slot,), nbytes)
        usable_ns = _seen([np.frombuffer(view, np.uint8) for view in views], tag, expected)
        self._regions[way].forget((slot,))
        return usable_ns

    def use_raw(self, base: int, slot: int, nbytes: int, tag: int, expected: int) -> int:
        view = self._raw[base][slot * nbytes : (slot + 1) * nbytes]
        return _seen([np.frombuffer(view, np.uint8)], tag, expected)

    def load(self, path: str, tag: int, expected: int) -> int:
        from safetensors.numpy import load_file

        return _seen([load_file(path)["rows"]], tag, expected)


def _seen(views: list[np.ndarray], tag: int, expected: int) -> int:
    """When the item was usable, in ns of the host's clock.  Raises ValueError if it is another."""
    ends = (views[0][:TAG_NBYTES], views[-1][-TAG_NBYTES:])
    tags = [int.from_bytes(end.tobytes(), "little") for end in ends]
    usable_ns = time.perf_counter_ns()
    if tags != [tag, tag]:
        raise ValueError(f"tags {tags} instead of {tag}: other bytes landed than were sent")
    if len(views) == 1 and fingerprint(views[0]) != expected:
        raise ValueError(f"item {tag}: some page is not as it was sent")
    return usable_ns


async def main(fd: int) -> None:
    receiving = Receiving()
    await answer_all(fd, receiving)
    await receiving.release()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
