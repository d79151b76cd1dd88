"""One side of `epd bench soak`: an engine, and for the owner a region with guarded free slots.

A slot without a lease holds `GUARD` in every byte, and is checked when it is leased again.  So a
byte that lands after its write has ended or been fenced shows up even if nothing reads it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS
from epd.transport.base import Region, TransferEngine, Written
from epd.transport.checksum import checksum_of
from epd.transport.host import this_host_id
from epd_lab.bench.transports.words import answer_all

GUARD = 0xEE
BASE_NBYTES = 8 << 20
_base = np.random.default_rng(7).integers(0, 256, BASE_NBYTES, np.uint8)


def content(item: int, attempt: int, nbytes: int) -> np.ndarray:
    """Bytes that no other item and no other attempt has."""
    start = (item * 4099 + attempt * 1_000_003) % (BASE_NBYTES - nbytes)
    rows = _base[start : start + nbytes].copy()
    tag = np.frombuffer(f"{item}/{attempt}".encode().ljust(16), np.uint8)[:nbytes]
    rows[: tag.size] = tag
    return rows


class Side:
    """Owner or writer."""

    def __init__(self) -> None:
        self._engine: TransferEngine | None = None
        self._region: Region | None = None
        self._free_sum = 0

    def start(
        self, backend: str, instance_id: str, directory: str, host: str = "127.0.0.1",
        secret: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        epoch = time.time_ns() // 1000
        settings = BackendSettings(
            instance_id, epoch, checksums=True, host=host, secret=bytes.fromhex(secret),
            directory=directory,
        )  # fmt: skip
        self._engine = BACKENDS[backend].make(settings)
        return {"epoch": epoch, "pid": os.getpid(), "host_id": this_host_id()}

    async def own(self, slots: int, slot_nbytes: int) -> dict[str, Any]:
        """The descriptor, and how long it took to allocate and touch every page."""
        assert self._engine is not None
        began_s = time.perf_counter()
        self._region = self._engine.allocate("pool", slots, slot_nbytes)
        took_s = time.perf_counter() - began_s
        np.frombuffer(self._region.buffer, np.uint8)[:] = GUARD
        self._free_sum = checksum_of([memoryview(bytes([GUARD]) * slot_nbytes)])
        remote = msgspec.to_builtins(self._region.remote)
        return {"remote": remote, "allocate_s": took_s}

    def take(self, slot: int) -> bool:
        """Whether nothing has landed in this slot since it became free."""
        assert self._region is not None
        views = self._region.views((slot,), self._region.remote.slot_nbytes)
        return checksum_of(views) == self._free_sum

    def check(self, slot: int, nbytes: int) -> int:
        """The sum of what is in the slot, which is free from now on."""
        assert self._region is not None
        found = checksum_of(self._region.views((slot,), nbytes))
        self.free(slot)
        return found

    def free(self, slot: int) -> None:
        assert self._region is not None
        self._region.forget((slot,))
        for view in self._region.views((slot,), self._region.remote.slot_nbytes):
            np.frombuffer(view, np.uint8)[:] = GUARD

    async def write(
        self, target: list[Any], slot: int, item: int, attempt: int, nbytes: int
    ) -> list[Any]:
        assert self._engine is not None
        remote = msgspec.convert(target, RemoteRegion)
        outcome = await self._engine.write([content(item, attempt, nbytes)], remote, (slot,))
        if isinstance(outcome, Written):
            return ["Written", outcome.checksum]
        return [type(outcome).__name__, outcome.reason]

    async def meet(self, target: list[Any]) -> None:
        """Be connected with the owner, by a write of nothing."""
        assert self._engine is not None
        await self._engine.write([], msgspec.convert(target, RemoteRegion), ())

    async def fence(self, instance_id: str, epoch: int, pid: int, host_id: str) -> bool:
        assert self._engine is not None
        return await self._engine.fence(Address(instance_id, epoch, ""), host_id, pid)

    def state(self) -> dict[str, int]:
        """File descriptors and resident KiB that this process holds now."""
        with open("/proc/self/status", encoding="ascii") as status:
            resident = next(line for line in status if line.startswith("VmRSS"))
        return {"fds": len(os.listdir("/proc/self/fd")), "rss_kib": int(resident.split()[1])}

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._engine = self._region = None
        await asyncio.sleep(0)


async def main(fd: int) -> None:
    side = Side()
    await answer_all(fd, side)
    await side.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
