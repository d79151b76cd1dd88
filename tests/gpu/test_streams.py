"""Ordering edges between streams, each shown by a delay kernel and missed when it is taken out."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from epd.engine.device.cuda_events import CudaEventBridge
from epd.engine.device.executor import Deferred, DeviceExecutor
from epd.engine.device.pinned import register
from epd.engine.device.streams import DOWNLOAD, DeviceStreams
from epd.engine.language.kv_hop import KvHop
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.row_splice import LiftedRows
from epd.messages import KvLayout

DELAY_CYCLES = 200_000_000  # about a tenth of a second
LAYOUT = KvLayout(
    num_layers=2,
    block_size=16,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    block_nbytes=2 * 2 * 16 * 2 * 64 * 4,
)


class Device:
    def __init__(self) -> None:
        device = torch.device("cuda")
        self.streams = DeviceStreams(device)
        bridge = CudaEventBridge(lanes=self.streams.lanes)
        self.executor = DeviceExecutor(completion=bridge, streams=self.streams)
        self.pool = KvPool(LAYOUT, 8, torch.float32, "cuda")
        self.hop = KvHop(self.pool, self.streams)


@pytest.fixture
def device(cuda: str) -> Iterator[Device]:
    made = Device()
    assert made.pool.tensor.is_cuda
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()


@contextlib.contextmanager
def without(method: str) -> Iterator[None]:
    """An ordering edge taken out."""
    original = getattr(torch.cuda.Stream, method)
    setattr(torch.cuda.Stream, method, lambda self, other: None)
    try:
        yield
    finally:
        setattr(torch.cuda.Stream, method, original)


class NoCompletion(CudaEventBridge):
    """A bridge that does not wait."""

    def watch(self, deliver: Any, lane: str = "") -> None:
        deliver(None)


def slow_rows(device: Device) -> Deferred[torch.Tensor]:
    rows = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(DELAY_CYCLES)
    rows.fill_(7.0)
    host = device.streams.download(rows)
    return Deferred(lambda: host, DOWNLOAD)


async def test_rows_are_read_behind_their_kernels(device: Device) -> None:
    """F2: the future of an encode gives rows that the kernels have filled."""
    rows = await device.executor.launch(slow_rows, device)
    assert bool((rows == 7.0).all())
    with without("wait_stream"):
        rows = await device.executor.launch(slow_rows, device)
        assert not bool((rows == 7.0).all()), "without the edge the copy runs ahead"
    await device.executor.close()


async def test_a_future_waits_for_its_lane(device: Device) -> None:
    """F2: without the event of the stream the bytes are read too early."""
    hasty = DeviceExecutor(completion=NoCompletion(), streams=device.streams)
    rows = await hasty.launch(slow_rows, device)
    assert not bool((rows == 7.0).all())
    torch.cuda.synchronize()
    await hasty.close()
    await device.executor.close()


async def test_the_launch_thread_and_the_loop_do_not_wait(device: Device) -> None:
    """Ten slow calls are queued at once, and the loop turns meanwhile."""
    futures = [device.executor.launch(slow_rows, device) for _ in range(3)]
    turns = 0
    while not futures[-1].done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 50
    await asyncio.gather(*futures)
    await device.executor.close()


def land_slowly(device: Device, host: torch.Tensor) -> Deferred[torch.Tensor]:
    """An upload that is held up, then a step that reads what it brings."""
    with torch.cuda.stream(device.streams.upload_stream):
        torch.cuda._sleep(DELAY_CYCLES)
    tensor = device.streams.upload(host)
    total = tensor.sum()
    answer = device.streams.download(total)
    return Deferred(lambda: answer, DOWNLOAD)


async def test_a_step_waits_for_its_upload(device: Device) -> None:
    """F23, F28: a forward reads KV or rows that another stream brings only when they are there."""
    host = torch.full((1 << 20,), 3.0).pin_memory()
    expected = 3.0 * (1 << 20)
    for _ in range(3):
        assert float(await device.executor.launch(land_slowly, device, host)) == expected
    host = torch.full((1 << 20,), 5.0).pin_memory()  # what lay there before is not this
    expected = 5.0 * (1 << 20)
    with without("wait_stream"):
        wrong = float(await device.executor.launch(land_slowly, device, host))
    assert wrong != expected, "without the edge the sum is of what lay there before"
    await device.executor.close()


def lift_slowly(device: Device, host: torch.Tensor, *, waits: bool) -> Deferred[torch.Tensor]:
    """Rows that are held up on their way, then a step that reads them."""
    lifted = LiftedRows()
    lifted.tensor = torch.zeros(host.shape, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(device.streams.lift_stream):
        torch.cuda._sleep(DELAY_CYCLES)
    lifted.passed = device.streams.lift(lifted.tensor, [host])
    rows = lifted.on_device() if waits else lifted.tensor
    assert rows is not None
    answer = device.streams.download(rows.sum())
    return Deferred(lambda: answer, DOWNLOAD)


async def test_a_step_waits_for_rows_that_were_on_their_way(device: Device) -> None:
    """F23: they went up when they arrived, and the step that reads them does not copy them."""
    host = torch.full((1 << 20,), 3.0).pin_memory()
    lift = partial(lift_slowly, device, host)
    assert float(await device.executor.launch(partial(lift, waits=True))) == 3.0 * (1 << 20)
    wrong = float(await device.executor.launch(partial(lift, waits=False)))
    assert wrong == 0.0, "without the edge the sum is of what lay there before"
    await device.executor.close()


async def test_kv_lands_and_leaves_as_it_was(device: Device) -> None:
    """Blocks fetched, sent and landed elsewhere are the same bytes; neighbours are untouched."""
    landing = memoryview(bytearray(4 * LAYOUT.block_nbytes))
    device.hop.attach(landing)
    device.pool.tensor.copy_(torch.randn(device.pool.tensor.shape, device="cuda"))
    before = device.pool.tensor.clone()
    torch.cuda.synchronize()  # what is fetched is final
    nbytes = LAYOUT.block_nbytes
    for slot, block in ((3, 5), (0, 2)):
        slots = [block * LAYOUT.slots_per_block + n for n in range(LAYOUT.slots_per_block)]
        views = await device.executor.launch(device.hop.fetch, slots)
        landing[slot * nbytes : (slot + 1) * nbytes] = b"".join(views)
    await device.executor.launch(device.hop.land, landing, (3, 0), (1, 7))
    after = device.pool.tensor
    assert torch.equal(after[1], before[5]) and torch.equal(after[7], before[2])
    kept = [0, 2, 3, 4, 5, 6]
    assert torch.equal(after[kept], before[kept])
    await device.executor.close()
    del landing


@pytest.mark.parametrize("on_device", [True, False])
async def test_kv_lands_beside_a_step(device: Device, on_device: bool) -> None:
    """It is used by none that is launched, and is there before the next one is planned."""
    drawn = torch.randint(0, 256, (4, LAYOUT.block_nbytes), dtype=torch.uint8)
    landing: Any = memoryview(drawn.numpy()).cast("B")
    if on_device:
        landing = device.pool.memory  # where peers write
        landing[:4] = drawn.cuda()
        torch.cuda.synchronize()
    else:
        device.hop.attach(landing)
    await device.executor.launch(device.hop.land, landing, (1, 2), (4, 5))  # memory of its own
    stepping = device.executor.launch(torch.cuda._sleep, DELAY_CYCLES)
    await device.executor.launch(device.hop.land, landing, (3, 0), (6, 7))
    assert not stepping.done()
    with torch.cuda.stream(torch.cuda.Stream()):  # another one than the step's
        landed = device.pool.memory[[6, 7]].cpu()
    assert not stepping.done(), "the step is still running"
    assert torch.equal(landed, drawn[[3, 0]])
    await stepping
    await device.executor.close()
    del landing


def test_memory_that_is_refused_is_told_and_works(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """What is registered already is refused; the refusal must not surface in somebody's kernel."""
    buffer = memoryview(bytearray(1 << 20))
    first = register(buffer, device)
    assert first.is_pinned() and not caplog.records
    again = register(buffer, device)
    assert "does not pin 1048576 bytes" in caplog.text
    assert float((device.streams.upload(again) + 1.0).sum()) == 1 << 20


def test_pieces_go_up_as_one_and_wait_for_no_kernel(device: Device) -> None:
    """Rows are brought while a step runs, not inside it."""
    pieces = [torch.full((n, 8), float(n)).pin_memory() for n in (3, 1, 2)]
    device.streams.upload(*pieces)  # the stream's own memory is there
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    arrived = device.streams.upload(*pieces)
    device.streams.upload_stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the step is still running"
    assert torch.equal(arrived.cpu(), torch.cat(pieces))


LOSE = """
import asyncio, torch
from epd.config import EngineConfig
from epd.engine.base import DeviceLost
from epd.engine.factory import build_executor

async def main():
    executor = build_executor(EngineConfig(device="cuda", threads=1))
    assert await executor.launch(lambda: 1) == 1
    wrong = torch.tensor([1 << 40], device="cuda")
    for call in (lambda: torch.zeros(4, device="cuda")[wrong], lambda: 2):
        try:
            await executor.launch(call)
        except DeviceLost as error:
            print("lost:", str(error)[:40])

asyncio.run(main())
"""


def test_a_sticky_error_is_a_lost_device(cuda: str) -> None:
    """Fault F49: an illegal index, and then whatever comes after it."""
    ran = subprocess.run(
        [sys.executable, "-c", LOSE], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.count("lost: the device does not work") == 2, ran.stderr[-2000:]


async def test_blocks_may_be_reused_once_their_fetch_is_launched(device: Device) -> None:
    """The next tenant's step is launched behind the gather and cannot change what is sent."""
    device.pool.tensor.fill_(1.0)
    torch.cuda.synchronize()  # what is fetched is final

    def fetch_late() -> Any:
        torch.cuda._sleep(DELAY_CYCLES)
        return device.hop.fetch((2,))

    fetched = device.executor.launch(fetch_late)
    device.executor.launch(lambda: device.pool.tensor.fill_(9.0))
    (view,) = await fetched
    assert bool((torch.frombuffer(view, dtype=torch.float32) == 1.0).all())
    await device.executor.close()


async def test_what_is_final_leaves_while_more_is_computed(device: Device) -> None:
    """Layers of a step that goes on: its kernels do not hold up the KV of those before."""
    device.pool.tensor.fill_(3.0)
    await device.executor.launch(device.hop.fetch, (4,))  # kernels are loaded, memory is pinned
    torch.cuda.synchronize()
    computing = device.executor.launch(slow_rows, device)
    (view,) = await device.executor.launch(device.hop.fetch, (4,))
    assert not computing.done()
    assert set(memoryview(view).cast("f")) == {3.0} and view.nbytes == LAYOUT.slot_nbytes
    await computing
    await device.executor.close()
