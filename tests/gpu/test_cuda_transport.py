"""The transport between GPUs, by the real driver, between real processes that are killed.

With one GPU both processes are on it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from epd.messages import Address, RemoteRegion
from epd.tiny import CHECKPOINT
from epd.transport.backend import BackendSettings
from epd.transport.base import WriteFailed, Written
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.cuda.driver import CudaDevice, missing
from epd.transport.host import this_host_id
from epd.transport.mooncake import library as mooncake_library
from epd_lab.bench.transports.hop_device import measure
from tests.e2e.client import Body, png, post_all, question
from tests.e2e.server import serving
from tests.engine.conftest import drawn_image
from tests.patience import PATIENCE_S
from tests.transport.test_shm_processes import Family

pytestmark = [pytest.mark.gpu, pytest.mark.more_gpus, pytest.mark.timeout(150)]
WORKING_SET_NBYTES = 64 << 20  # that a driver may keep


@pytest.fixture
def other(cuda: str) -> int:
    """The GPU of the other process."""
    if reason := missing():
        pytest.skip(reason)
    return min(1, int(torch.cuda.device_count()) - 1)


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Family]:
    os.chmod(tmp_path, 0o700)
    made = Family(str(tmp_path))
    yield made
    await made.close()


@pytest.fixture
async def here(family: Family, other: int) -> AsyncIterator[CudaTransferEngine]:
    """On the first GPU."""
    torch.cuda.set_device(0)
    engine = CudaTransferEngine(BackendSettings("here", 1), CudaDevice(0), family.directory)
    yield engine
    await engine.close()


def works() -> bool:
    """This process's context computes, and rightly."""
    ones = torch.ones(512, 512, device="cuda")
    return bool((ones @ ones == 512).all())


async def test_rows_and_scattered_kv_arrive_byte_by_byte(other: int) -> None:
    figures = await measure(5)  # raises where a byte differs
    assert {"rows", "KV/1", "KV/4", "last/36"} <= {figure.what for figure in figures}


async def test_an_owner_killed_in_the_middle_of_writes(
    family: Family, here: CudaTransferEngine, other: int
) -> None:
    """Its memory comes back when we have unmapped it; our context is not harmed."""
    assert works()
    free_nbytes = torch.cuda.mem_get_info(other)[0]
    pid, line = await family.child(f"cuda:{other}-own", "owner", "1")
    target = msgspec.json.decode(line, type=RemoteRegion)
    nbytes = target.num_slots * target.slot_nbytes
    source = torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda:0")
    slots = range(target.num_slots)
    num_written = 0

    async def write_on() -> None:
        nonlocal num_written
        while isinstance(outcome := await here.write([source], target, slots), Written):
            num_written += 1
            if num_written == 100:
                os.kill(pid, signal.SIGKILL)
        assert isinstance(outcome, WriteFailed)

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(write_on() for _ in range(8)))
    assert num_written > 100
    assert works()
    until_s = time.monotonic() + 10.0
    while torch.cuda.mem_get_info(other)[0] < free_nbytes - WORKING_SET_NBYTES:
        assert time.monotonic() < until_s, "the dead owner's memory is still taken"
        await asyncio.sleep(0.05)
    assert await here.settle(Address("owner", 1, ""))


@pytest.mark.parametrize("life", range(3))
async def test_a_writer_killed_in_the_middle_of_writes(
    family: Family, here: CudaTransferEngine, other: int, life: int
) -> None:
    """No byte lands after the fence, which is its process's end."""
    region = here.allocate("pool", 32, 8 << 20)
    memory = torch.as_tensor(region.buffer, device="cuda:0")
    described = msgspec.json.encode(region.remote).decode()
    pid, line = await family.child(f"cuda:{other}-write", "writer", str(life), described)
    assert line == "writing\n"
    memory.fill_(0xEE)
    await asyncio.sleep(0.05)
    assert bool((memory != 0xEE).any()), "it writes on"
    peer = Address("writer", life, "")
    assert not await here.fence(peer, this_host_id(), pid)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while not await here.fence(peer, this_host_id(), pid):
            await asyncio.sleep(0.001)
    memory.fill_(0xEE)
    torch.cuda.synchronize()
    for _ in range(20):
        assert bool((memory == 0xEE).all()), "a byte landed after the fence"
        await asyncio.sleep(0.01)
    assert works()


def bodies(count: int) -> list[Body]:
    """Texts of all lengths, two of three with images."""
    chance = random.Random(5)
    asked = []
    for number in range(count):
        urls = [
            png(drawn_image(number * 4 + i, chance.randrange(32, 300), chance.randrange(32, 300)))
            for i in range(number % 3)
        ]
        text = " ".join(f"word{chance.randrange(99)}" for _ in range(chance.randrange(3, 60)))
        asked.append(question(f"{number}: {text}", *urls, max_tokens=12))
    return asked


async def answers_over(transport: str, count: int) -> list[str]:
    """To `bodies`, by three processes on the GPUs in turn, in single precision."""
    settings = {
        "transport": transport, "engine__dtype": "float32", "engine__kv_nbytes": "512MiB",
        "engine__device": ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count())),
    }  # fmt: skip
    with serving("1e1p1d", model=CHECKPOINT, **settings) as server:
        assert server.instances()["p0"]["transports"] == {"d0": transport, "e0": transport}
        return [r.text for r in await post_all(server.base_url, bodies(count))]


@pytest.mark.timeout(300)
async def test_two_hundred_answers_are_those_of_shared_memory(other: int) -> None:
    transports = ["shm", "cuda", "tcp"]
    if not mooncake_library.missing():
        transports.append("mooncake")
    said = {transport: await answers_over(transport, 200) for transport in transports}
    differ = {name: [i for i in range(200) if said["shm"][i] != said[name][i]] for name in said}
    print(f"equal over {', '.join(said)}")
    assert differ == {name: [] for name in said}
