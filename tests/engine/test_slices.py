"""Long calls give way between their layers, and what they compute is the same."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from epd.engine.cuda_events import CudaEventBridge
from epd.engine.executor import DeviceExecutor, Mark
from epd.engine.slices import Slices
from tests.engine.test_executor import PATIENCE_S, Events, until

NUM_LAYERS = 6


def tower(
    executor: DeviceExecutor, quantum_s: float
) -> tuple[Slices, nn.Sequential, list[nn.Module]]:
    layers = [nn.Linear(4, 4) for _ in range(NUM_LAYERS)]
    return Slices(executor, layers, quantum_s), nn.Sequential(*layers), layers


@pytest.mark.parametrize(("quantum_s", "per_slice"), [(0.0, 0), (0.25, 2), (0.01, 1), (9.0, 0)])
async def test_others_are_served_between_slices(quantum_s: float, per_slice: int) -> None:
    """A layer of this run takes a tenth of a second, as was measured."""
    executor = DeviceExecutor()
    slices, model, layers = tower(executor, quantum_s)
    slices.measured(100, 0.1 * NUM_LAYERS)
    order: list[str] = []
    queued, go = threading.Event(), threading.Event()
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: order.append(f"layer {index}"))

    def run() -> torch.Tensor:
        queued.set()
        assert go.wait(PATIENCE_S)
        slices.begin(100)
        with torch.inference_mode():
            return model(torch.ones(4))

    batch = executor.launch(run)
    assert await asyncio.to_thread(queued.wait, PATIENCE_S)
    step = executor.launch(lambda: order.append("step"))
    go.set()
    rows = await batch
    await step
    with torch.inference_mode():
        assert torch.equal(rows, model(torch.ones(4)))
    assert order[: NUM_LAYERS + 1].index("step") == (per_slice or NUM_LAYERS)
    await executor.close()


async def test_one_slice_is_ahead_of_the_device() -> None:
    """The second cut waits until the device has passed the first one, and serves meanwhile."""
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    cuts: list[int] = []

    def run() -> None:
        mark: Mark | None = None
        for cut in range(3):
            mark = executor.give_way(mark)
            cuts.append(cut)

    batch = executor.launch(run)
    await until(lambda: len(events.made) == 2)  # of two cuts
    step = executor.launch(lambda: "served")
    await until(lambda: len(events.made) == 3)  # and of the step
    assert cuts == [0]
    events.made[0].passed.set()
    events.made[2].passed.set()
    await until(lambda: len(cuts) == 2)
    for event in events.made:
        event.passed.set()
    assert await step == "served"
    await until(lambda: len(events.made) == 5)
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
        executor.give_way(executor.give_way(None))
        return "whole"

    batch = executor.launch(run)
    step = executor.launch(lambda: "step")
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0.01)
    go.set()
    assert await closing is True
    assert (await batch, await step) == ("whole", "step")
