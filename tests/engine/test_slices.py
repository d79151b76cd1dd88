"""Long calls give way between their layers, and what they compute is the same."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from epd.engine import executor as executors
from epd.engine.cuda_events import CudaEventBridge
from epd.engine.executor import DeviceExecutor
from epd.engine.slices import PER_QUANTUM, Slices
from tests.engine.test_executor import PATIENCE_S, Events, until

NUM_LAYERS = 12
LAYER_S = 0.125  # as was measured


class Clock:
    """Each layer takes as long as was measured."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("quantum_s", "served_behind"), [(0.0, 12), (0.5, 4), (1.0, 8), (0.01, 1), (9.0, 12)]
)
async def test_who_has_waited_for_a_quantum_is_served(
    quantum_s: float, served_behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    executor = DeviceExecutor()
    monkeypatch.setattr(executors, "time", clock)
    layers = [nn.Linear(4, 4) for _ in range(NUM_LAYERS)]
    slices, model = Slices(executor, layers, quantum_s), nn.Sequential(*layers)
    slices.measured(100, LAYER_S * NUM_LAYERS)
    order: list[int] = []

    def passed(*_: object) -> None:
        clock.now_s += LAYER_S
        order.append(len(order))

    for layer in layers:
        layer.register_forward_hook(passed)
    queued, go = threading.Event(), threading.Event()

    def run() -> torch.Tensor:
        queued.set()
        assert go.wait(PATIENCE_S)
        slices.begin(100)
        with torch.inference_mode():
            return model(torch.ones(4))

    await executor.launch(lambda: None)  # the step before
    batch = executor.launch(run)
    assert await asyncio.to_thread(queued.wait, PATIENCE_S)
    step = executor.launch(lambda: len(order))
    go.set()
    rows = await batch
    assert await step == served_behind
    assert slices._per_slice == max(1, int(quantum_s / PER_QUANTUM / LAYER_S)) * bool(quantum_s)
    with torch.inference_mode():
        assert torch.equal(rows, model(torch.ones(4)))
    monkeypatch.undo()
    await executor.close()


async def test_one_slice_is_ahead_of_the_device() -> None:
    """At the second cut it waits until the device has passed the first one."""
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    layers = [nn.Linear(4, 4) for _ in range(4)]
    slices, model = Slices(executor, layers, 0.001), nn.Sequential(*layers)
    slices.measured(1, 1.0)

    def run() -> None:
        slices.begin(1)
        with torch.inference_mode():
            model(torch.ones(4))

    batch = executor.launch(run)
    for passed in range(2):
        await until(lambda passed=passed: len(events.made) == 2 + passed)  # type: ignore[misc]
        await asyncio.sleep(0.01)
        assert len(events.made) == 2 + passed
        events.made[passed].passed.set()
    await until(lambda: len(events.made) == 4)  # three cuts, and the call
    for event in events.made:
        event.passed.set()
    await batch
    assert await executor.close()


async def test_a_call_that_gives_way_is_finished_before_the_end() -> None:
    """Closing waits for it, and for what was queued."""
    executor = DeviceExecutor()
    started, go = threading.Event(), threading.Event()

    def run() -> str:
        started.set()
        assert go.wait(PATIENCE_S)
        executor.give_way(0.0)
        executor.give_way(0.0)
        return "whole"

    batch = executor.launch(run)
    step = executor.launch(lambda: "step")
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0.01)
    go.set()
    assert await closing is True
    assert (await batch, await step) == ("whole", "step")
