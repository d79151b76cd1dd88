"""A process of its own: `python engine_child.py BACKEND DIRECTORY own|write ID EPOCH ...`.

`own`: allocates a region, prints its descriptor, waits.
`write DESCRIPTOR`: prints "writing" after the first write and goes on, refused or not, until it is
killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS
from epd.transport.base import TransferEngine, Written


async def own(engine: TransferEngine) -> None:
    region = engine.allocate("pool", 16, 1 << 20)
    print(msgspec.json.encode(region.remote).decode(), flush=True)
    await asyncio.sleep(60)


async def write(engine: TransferEngine, target: RemoteRegion) -> None:
    source = bytes([0x11]) * (target.num_slots * target.slot_nbytes)
    announced = False
    while True:
        outcome = await engine.write([source], target, range(target.num_slots))
        if isinstance(outcome, Written) and not announced:
            print("writing", flush=True)
            announced = True
        if not isinstance(outcome, Written):
            await asyncio.sleep(0.01)


async def main(backend: str, directory: str, what: str, name: str, epoch: str, *more: str) -> None:
    settings = BackendSettings(name, int(epoch), directory=directory)
    engine = BACKENDS[backend].make(settings)
    if what == "own":
        await own(engine)
    else:
        await write(engine, msgspec.json.decode(more[0], type=RemoteRegion))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
