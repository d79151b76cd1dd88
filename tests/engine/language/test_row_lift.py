"""Rows that came through host memory are on their way to the device before their step is asked
for, and stay each other's neighbours and nobody's mistake."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from epd.engine.base import Rows, RowSpan, SlotRows
from epd.engine.device.executor import Completion, DeviceExecutor
from epd.engine.language.row_lift import RowLift
from epd.engine.language.row_splice import LiftedRows, RowSplicer
from epd.messages import RowContract
from tests.engine.driver import Driver


class HostStreams:
    """A device whose memory is the host's: copies are done when they are queued."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_waits = 0

    def lift(self, target: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Any:
        torch.cat(list(pieces), out=target)
        return self

    def wait(self) -> None:
        """As the event behind a copy."""
        self.num_waits += 1


@pytest.fixture
def contract(driver: Callable[[str], Driver]) -> RowContract:
    found = driver("qwen3_vl").language.row_contract
    assert found is not None
    return found


def arrived(contract: RowContract, *counts: int) -> tuple[list[memoryview], torch.Tensor]:
    """Rows in slots of so many, and all of them."""
    rows = torch.randn(sum(counts), contract.row_width)
    return [memoryview(piece.clone().numpy()).cast("B") for piece in rows.split(counts)], rows


def lift_of(contract: RowContract, executor: DeviceExecutor, num_rows: int = 1000) -> RowLift:
    nbytes = num_rows * contract.row_nbytes
    return RowLift(contract, torch.float32, executor, executor.streams, nbytes)


async def until_launched(executor: DeviceExecutor) -> None:
    await executor.launch(lambda: None)


async def test_a_step_reads_what_was_copied_when_it_arrived(contract: RowContract) -> None:
    """Not what is in host memory when the step is launched."""
    streams: Any = HostStreams()
    executor = DeviceExecutor(streams=streams)
    views, rows = arrived(contract, 3, 3, 1)
    lifted = lift_of(contract, executor)(views)
    await until_launched(executor)
    for view in views:
        view[:] = bytes(view.nbytes)
    splicer = RowSplicer(contract, torch.float32)
    for first, count in ((0, 7), (2, 3), (6, 1)):
        read = splicer.rows(RowSpan(0, first, count, lifted))
        assert torch.equal(read, rows[first : first + count])
    assert streams.num_waits == 3, "kernels that read them wait for the copy"
    assert await executor.close()


class Held(Completion):
    """The device passes nothing before it is let."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Any]] = []

    def watch(self, deliver: Any, lane: str = "") -> None:
        self.waiting.append((lane, deliver))


async def test_a_copy_keeps_its_memory_when_nobody_waits_for_it(contract: RowContract) -> None:
    """Its piece would be given out, and another image's rows be overwritten."""
    completion, lifts = Held(), []

    def lift(target: torch.Tensor, pieces: Sequence[torch.Tensor]) -> object:
        lifts.append(sum(len(piece) for piece in pieces))
        return object()

    streams: Any = HostStreams()
    streams.lift = lift
    executor = DeviceExecutor(completion=completion, streams=streams)
    lift_rows = lift_of(contract, executor, 4096)
    free = lift_rows.arena.free_nbytes
    views, rows = arrived(contract, 5)
    lifted = lift_rows(views)
    for _ in range(500):
        if completion.waiting:
            break
        await asyncio.sleep(0.01)
    assert lifts == [rows.numel()]
    del lifted
    gc.collect()
    assert lift_rows.arena.free_nbytes < free, "the device still writes there"
    (lane, deliver) = completion.waiting.pop()
    assert lane == "lift"
    deliver(None)
    del deliver
    await until_freed(lift_rows, free)
    completion.watch = lambda deliver, lane="": deliver(None)  # type: ignore[method-assign]
    assert await executor.close()


async def until_freed(lift: RowLift, free_nbytes: int) -> None:
    for _ in range(500):
        gc.collect()
        if lift.arena.free_nbytes == free_nbytes:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the piece has not come back")


async def test_what_finds_no_room_goes_up_with_its_step(contract: RowContract) -> None:
    executor = DeviceExecutor(streams=HostStreams())
    size = contract.row_nbytes
    lift = lift_of(contract, executor, -(-4096 // size) + 4)
    views, _ = arrived(contract, 4)
    first = lift(views)
    assert isinstance(first, LiftedRows)
    many, _ = arrived(contract, lift.arena.nbytes // size)
    assert lift(many) is many
    torn = [memoryview(bytes(size + 1))]
    assert lift(torn) is torn
    await until_launched(executor)
    assert await executor.close()
    assert lift(views) is views, "no call is taken any more"


async def test_a_copy_that_failed_leaves_rows_where_they_are(contract: RowContract) -> None:
    def lift(*_: object) -> object:
        raise RuntimeError("out of memory")

    streams: Any = HostStreams()
    streams.lift = lift
    executor = DeviceExecutor(streams=streams)
    views, rows = arrived(contract, 2, 1)
    lifted = lift_of(contract, executor)(views)
    assert isinstance(lifted, LiftedRows)
    await until_launched(executor)
    read = RowSplicer(contract, torch.float32).rows(RowSpan(0, 1, 2, lifted))
    assert torch.equal(read, rows[1:])
    assert await executor.close()


async def test_an_engine_on_a_device_lifts_what_lies_in_host_memory_alone(
    driver: Callable[[str], Driver], contract: RowContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    language: Any = driver("qwen3_vl").language
    views, rows = arrived(contract, 2, 2)
    memory: Any = SimpleNamespace(buffer=memoryview(bytes(64 * contract.row_nbytes)))
    monkeypatch.setattr(language, "row_memory", None, raising=False)
    language.attach_rows(memory)
    assert language.lift_rows(views) is views, "the device is the host"
    monkeypatch.setattr(language._executor, "streams", HostStreams())
    monkeypatch.setattr(language, "_hop", mock.Mock())
    monkeypatch.setattr(language, "_lift", None)
    language.attach_rows(memory)
    assert isinstance(language.lift_rows(views), LiftedRows)
    for there in (Rows(rows, 4, rows.nbytes), SlotRows((1,), 4, is_sharded=False)):
        assert language.lift_rows(there) is there
