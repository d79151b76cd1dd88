"""A process of its own for the shared memory tests: `python shm_child.py DIRECTORY own|write ...`.

`own ID EPOCH`: allocates a region, prints its descriptor, waits.
`write ID EPOCH DESCRIPTOR`: prints "writing" after the first write and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from epd.messages import RemoteRegion
from epd.transport.base import Written
from epd.transport.shm import ShmTransferEngine


async def own(engine: ShmTransferEngine) -> None:
    region = engine.allocate("pool", 4, 1 << 20)
    print(msgspec.json.encode(region.remote).decode(), flush=True)
    await asyncio.sleep(60)


async def write(engine: ShmTransferEngine, target: RemoteRegion) -> None:
    source = bytes([0x11]) * (target.num_slots * target.slot_nbytes)
    announced = False
    while isinstance(await engine.write([source], target, range(target.num_slots)), Written):
        if not announced:
            print("writing", flush=True)
        announced = True


async def main(directory: str, what: str, instance_id: str, epoch: str, *more: str) -> None:
    engine = ShmTransferEngine(instance_id, int(epoch), directory=directory)
    if what == "own":
        await own(engine)
    else:
        await write(engine, msgspec.json.decode(more[0], type=RemoteRegion))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
