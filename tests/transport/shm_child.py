"""A process of its own: `python shm_child.py DIRECTORY own|write ...`; `fake-own` and so on
for the memory of a device that is none, `cuda:1-own` for a GPU's.

`own ID EPOCH`: allocates a region, prints its descriptor, waits.
`write ID EPOCH DESCRIPTOR`: prints "writing" after the first write and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Buffer, Written
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.cuda.driver import CudaDevice
from epd.transport.shm.backend import ShmTransferEngine
from tests.transport.fake_device import FakeDevice

Engine = ShmTransferEngine | CudaTransferEngine


async def own(engine: Engine) -> None:
    region = engine.allocate("pool", 4, 1 << 20)
    print(msgspec.json.encode(region.remote).decode(), flush=True)
    await asyncio.sleep(60)


async def write(engine: Engine, target: RemoteRegion) -> None:
    nbytes = target.num_slots * target.slot_nbytes
    source: Buffer = bytes([0x11]) * nbytes
    if isinstance(engine, CudaTransferEngine):
        source = engine._device.allocate(nbytes).whole[:nbytes]
    announced = False
    while isinstance(await engine.write([source], target, range(target.num_slots)), Written):
        if not announced:
            print("writing", flush=True)
        announced = True


async def main(directory: str, what: str, instance_id: str, epoch: str, *more: str) -> None:
    engine: Engine
    device, _, what = what.rpartition("-")
    if device:
        made = FakeDevice() if device == "fake" else CudaDevice(int(device.partition(":")[2]))
        engine = CudaTransferEngine(BackendSettings(instance_id, int(epoch)), made, directory)
    else:
        engine = ShmTransferEngine(BackendSettings(instance_id, int(epoch)), directory)
    if what == "own":
        await own(engine)
    else:
        await write(engine, msgspec.json.decode(more[0], type=RemoteRegion))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
