"""The receiving half of `epd bench hop`: a process that owns the memory and says when it is usable.

Told on stdin and answering on stdout, a line of JSON each way: `allocate` a region of a backend,
`use` what has landed in slots of it, `load` a safetensors file.  An answer carries the CPU seconds
that the process has spent so far.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import uvloop

from epd.bench.hop_lines import Lines
from epd.transport.base import Region, TransferEngine
from epd.transport.host_memory import anonymous
from epd.transport.mooncake_library import Library
from epd.transport.routing import BACKENDS, BackendSettings

PAGE = 4096


class Receiver:
    """One engine at a time."""

    def __init__(self) -> None:
        self._engine: TransferEngine | None = None
        self._region: Region | None = None
        self._raw: tuple[Library, memoryview] | None = None

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        result: Any = getattr(self, f"_{asked.pop('do')}")(**asked)
        if asyncio.iscoroutine(result):
            result = await result
        return {"cpu_s": time.process_time(), "result": result}

    async def _allocate(self, backend: str, directory: str, slots: int, nbytes: int) -> Any:
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if backend == "mooncake-raw":
            return self._allocate_raw(slots * nbytes)
        if backend in BACKENDS:
            settings = BackendSettings("receiver", time.time_ns(), directory=directory)
            self._engine = BACKENDS[backend](settings)
            self._region = self._engine.allocate("rows", slots, nbytes)
            remote = self._region.remote
            return [getattr(remote, name) for name in remote.__struct_fields__]
        return None

    def _allocate_raw(self, nbytes: int) -> list[Any]:
        if self._raw is not None:
            library, old = self._raw
            library.unregister(_address_of(old))
            library.give_back()
        library, memory = Library.acquire("127.0.0.1"), anonymous(nbytes)
        library.register(_address_of(memory), nbytes)
        self._raw = (library, memory)
        return [library.host, library.port, _address_of(memory)]

    def _use(self, slot: int, nbytes: int) -> int:
        """Every page is looked at, so that what is only mapped counts as little as it helps."""
        assert self._region is not None
        views = self._region.views((slot,), nbytes)
        seen = sum(int(np.frombuffer(view, np.uint8)[::PAGE].sum()) for view in views)
        self._region.forget((slot,))
        return seen

    def _note(self, slot: int, nbytes: int) -> None:
        """Nothing is to be done: the bytes are in plain memory."""

    def _load(self, path: str) -> int:
        from safetensors.numpy import load_file

        return int(load_file(path)["rows"][::PAGE].sum())


def _address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


async def main() -> None:
    receiver = Receiver()
    lines = await Lines.of(sys.stdin, sys.stdout)
    while (line := await lines.read()) is not None:
        lines.write(json.dumps(await receiver.answer(json.loads(line))))


if __name__ == "__main__":
    uvloop.run(main())
