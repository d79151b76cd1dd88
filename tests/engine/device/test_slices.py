"""Long calls give way between their layers, and what they compute is the same."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
from torch import nn

from epd.engine.base import EngineError
from epd.engine.device.cuda_events import CudaEventBridge
from epd.engine.device.executor import DeviceExecutor
from epd.engine.device.slices import Slices
from epd.scheduling.slice_cost import SliceCost
from tests.engine.device.test_executor import PATIENCE_S, Events, until

NUM_LAYERS = 12
LAYER_S = 0.125  # as was measured


def costly(num_layers: int) -> SliceCost:
    """Each layer is a slice, however fast it is."""
    cost = SliceCost(num_layers, 1e-12, lambda: 0.0)
    cost.observe(1, 1, num_layers, 1.0)
    return cost


@pytest.mark.parametrize(
    ("quantum_s", "served_behind"),
    [
        (0.0, [12, 12, 12]),
        (0.5, [4, 8, 12]),
        (1.0, [6, 12, 12]),
        (0.01, [1, 2, 3]),
        (9.0, [12] * 3),
    ],
)
async def test_one_call_is_served_at_each_cut(quantum_s: float, served_behind: list[int]) -> None:
    executor = DeviceExecutor()
    layers = [nn.Linear(4, 4) for _ in range(NUM_LAYERS)]
    cost = SliceCost(NUM_LAYERS, quantum_s, lambda: 0.0)
    cost.observe(100, 100, NUM_LAYERS, LAYER_S * NUM_LAYERS)
    slices, model = Slices(executor, layers, cost), nn.Sequential(*layers)
    order: list[int] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: order.append(len(order)))
    queued, go = threading.Event(), threading.Event()

    def run() -> torch.Tensor:
        queued.set()
        assert go.wait(PATIENCE_S)
        with slices.run(100, 100), torch.inference_mode():
            return model(torch.ones(4))

    batch = executor.launch_long(run)
    assert await asyncio.to_thread(queued.wait, PATIENCE_S)
    steps = [executor.launch(lambda: len(order)) for _ in served_behind]
    go.set()
    rows = await batch
    assert await asyncio.gather(*steps) == served_behind
    with torch.inference_mode():
        assert torch.equal(rows, model(torch.ones(4)))
    await executor.close()


async def test_one_slice_is_ahead_of_the_device() -> None:
    """Before each slice it waits until the device has begun the last one, of the run before too."""
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    layers = [nn.Linear(4, 4) for _ in range(4)]
    slices, model = Slices(executor, layers, costly(4)), nn.Sequential(*layers)

    def run() -> None:
        for _ in range(2):
            with slices.run(1, 1), torch.inference_mode():
                model(torch.ones(4))

    batch = executor.launch_long(run)
    launched = [2, 3, 4, 6, 7, 7, 8, 9]  # at four cuts and the end of a run
    for passed, count in enumerate(launched):
        await until(lambda count=count: len(events.made) == count)  # type: ignore[misc]
        await asyncio.sleep(0.01)
        assert len(events.made) == count, passed
        events.made[passed].passed.set()
    await until(lambda: len(events.made) == 11)
    for event in events.made:
        event.passed.set()
    await batch
    assert await executor.close()


async def test_long_calls_and_others_take_turns() -> None:
    """A long call is never run within another, and one other is run before each of its parts."""
    executor = DeviceExecutor()
    started, go = threading.Event(), threading.Event()
    order: list[str] = []

    def long(name: str) -> None:
        started.set()
        assert go.wait(PATIENCE_S)
        for part in range(3):
            executor.give_way()
            order.append(f"{name}{part}")

    calls = [executor.launch_long(long, "a")]
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    calls += [executor.launch_long(long, "b"), executor.launch_long(long, "c")]
    calls += [executor.launch(order.append, str(i)) for i in range(5)]
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(*calls)
    assert order == ["a0", "0", "a1", "1", "a2", "2", "b0", "3", "b1", "4", "b2", "c0", "c1", "c2"]
    assert await closing


async def test_whoever_has_just_been_run_is_owed_nothing() -> None:
    """A long call that begins behind another call begins at once."""
    executor = DeviceExecutor()
    started, go = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        started.set()
        assert go.wait(PATIENCE_S)
        order.append("0")

    def long(name: str) -> None:
        for part in range(2):
            executor.give_way()
            order.append(f"{name}{part}")

    await executor.launch_long(long, "a")
    calls = [executor.launch(first)]
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    calls += [executor.launch_long(long, "b"), executor.launch(order.append, "1")]
    go.set()
    await asyncio.gather(*calls)
    assert order == ["a0", "a1", "0", "b0", "1", "b1"]
    assert await executor.close()


async def test_what_is_brief_takes_nobodys_turn() -> None:
    """Nor does it end the turn of a step, before or behind it."""
    executor = DeviceExecutor()
    started, go = threading.Event(), threading.Event()
    order: list[str] = []

    def long() -> None:
        started.set()
        assert go.wait(PATIENCE_S)
        for part in range(4):
            executor.give_way()
            order.append(f"part{part}")

    calls = [executor.launch_long(long)]
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    for name in ("land0", "land1", "step0", "land2", "step1", "land3"):
        brief = name.startswith("land")
        launch = executor.launch_brief if brief else executor.launch
        calls.append(launch(order.append, name))
    go.set()
    await asyncio.gather(*calls)
    assert order == (
        ["part0", "land0", "land1", "step0", "part1", "land2", "step1", "part2", "land3", "part3"]
    )
    assert await executor.close()


async def test_a_rank_takes_as_many_turns_as_its_leader_gives() -> None:
    """Whatever is queued ahead of a turn runs before it; runs of fewer slices than turns, of as
    many, and several, as where an image has failed."""
    executor = DeviceExecutor()
    order: list[str] = []

    for num_layers, num_runs in ((1, 1), (2, 1), (6, 1), (2, 3)):
        layers = [nn.Identity() for _ in range(num_layers)]
        slices = Slices(executor, layers, costly(num_layers), is_led=True)
        for layer in layers:
            layer.register_forward_hook(lambda *_: order.append("layer"))

        def run(
            slices: Slices = slices,
            layers: list[nn.Identity] = layers,
            num_runs: int = num_runs,
        ) -> None:
            slices.turns = 2
            for _ in range(num_runs):
                with slices.run(1, 1):
                    nn.Sequential(*layers)(torch.ones(1))
            slices.end()
            order.append("join")

        calls = [executor.launch_long(run)]
        for turn in range(2):
            calls += [executor.launch(order.append, f"step {turn}{i}") for i in range(2)]
            calls.append(executor.launch_brief(order.append, "brief"))
            turns = executor.go_on()
        calls.append(executor.launch(order.append, "behind"))
        await asyncio.gather(*calls, turns)
        steps = [["step 00", "step 01", "brief"], ["step 10", "step 11", "brief"]]
        first = max(1, num_layers // 2)
        rest = num_layers * num_runs - first
        images = ["layer"] * first, ["layer"] * rest
        assert order == [*images[0], *steps[0], *images[1], *steps[1], "join", "behind"]
        order.clear()
    assert await executor.close()


async def test_a_call_that_waits_for_a_turn_ends_with_the_executor() -> None:
    """And what would follow it does not begin: other ranks would not be there."""
    executor = DeviceExecutor(max_queue=1)
    slices = Slices(executor, [nn.Identity(), nn.Identity()], costly(2), is_led=True)
    waits = threading.Event()

    def run() -> None:
        slices.turns = 2
        with contextlib.suppress(EngineError), slices.run(1, 1):  # failed images run again
            slices.next_layers(1)
            waits.set()
            slices.next_layers(1)
        slices.end()

    batch = executor.launch_long(run)
    assert await asyncio.to_thread(waits.wait, PATIENCE_S)
    assert await executor.close()
    with pytest.raises(EngineError, match="is closed"):
        await batch


async def test_a_turn_is_never_refused() -> None:
    """A run would wait for it for ever."""
    executor = DeviceExecutor(max_queue=1)
    started, go = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        go.wait(PATIENCE_S)

    executor.launch(run)
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    executor.launch(run)
    with pytest.raises(EngineError, match="1 calls waiting"):
        executor.launch(run)
    turn = executor.go_on()
    go.set()
    assert await turn == []
    assert await executor.close()


async def test_a_call_that_gives_way_is_finished_before_the_end() -> None:
    """Closing waits for it, and for what was queued."""
    executor = DeviceExecutor()
    started, go = threading.Event(), threading.Event()

    def run() -> str:
        started.set()
        assert go.wait(PATIENCE_S)
        for _ in range(3):
            executor.give_way()
        return "whole"

    batch = executor.launch_long(run)
    step = executor.launch(lambda: "step")
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0.01)
    go.set()
    assert await closing is True
    assert (await batch, await step) == ("whole", "step")


async def test_long_calls_that_were_postponed_count() -> None:
    executor = DeviceExecutor(max_queue=2)
    queued, gate, postponed = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        executor.give_way()
        queued.wait(PATIENCE_S)
        executor.give_way()
        postponed.set()
        gate.wait(PATIENCE_S)

    first = executor.launch_long(long)
    await until(executor._launch._jobs.empty)
    others = [executor.launch_long(lambda: 0), executor.launch_long(lambda: 0)]
    queued.set()
    await until(postponed.is_set)
    with pytest.raises(EngineError, match="2 calls waiting"):
        executor.launch_long(lambda: 0)
    gate.set()
    await asyncio.gather(first, *others)
    assert await executor.launch_long(lambda: 5) == 5
    await executor.close()


class Watch:
    """Of a made-up clock."""

    now_s = 0.0

    def __init__(self, *, on_gpu: bool) -> None:
        assert not on_gpu
        self._began_s = self.now_s
        self._elapsed_s = 0.0

    def stop(self) -> None:
        self._elapsed_s = self.now_s - self._began_s

    def elapsed_s(self) -> float:
        return self._elapsed_s


class Served:
    """Runs of a tower and steps on a device that computes by the made-up clock."""

    def __init__(self, *, is_led: bool) -> None:
        self.executor = DeviceExecutor()
        self.cost = SliceCost(NUM_LAYERS, 4.4 * LAYER_S, lambda: 0.0)
        layers = [nn.Identity() for _ in range(NUM_LAYERS)]
        self._slices = Slices(self.executor, layers, self.cost, is_led=is_led)
        self._tower = nn.Sequential(*layers)
        self._is_led = is_led
        self.load = 1.0
        for layer in layers:
            layer.register_forward_hook(lambda *_: passes(LAYER_S * self.load))

    def _run(self, num_turns: int) -> None:
        self._slices.turns = num_turns
        with self._slices.run(100, 100):
            self._tower(torch.ones(1))
        self._slices.end()

    async def num_slices(self, num_runs: int, step_s: float = 0.0, brief_s: float = 0.0) -> int:
        """Behind so many runs, with calls of these times ahead of each slice."""
        for _ in range(num_runs):
            num_turns = self.cost.num_slices(100, 100) if self._is_led else 0
            go = threading.Event()
            calls = [self.executor.launch_long(go.wait, PATIENCE_S)]
            calls.append(self.executor.launch_long(self._run, num_turns))
            for _ in range(num_turns or NUM_LAYERS):
                if brief_s:
                    calls.append(self.executor.launch_brief(passes, brief_s))
                if step_s:
                    calls.append(self.executor.launch(passes, step_s))
                if num_turns:
                    calls.append(self.executor.go_on())
            go.set()
            await asyncio.gather(*calls)
        return self.cost.num_slices(100, 100)


def passes(elapsed_s: float) -> None:
    Watch.now_s += elapsed_s


@pytest.mark.parametrize("is_led", [False, True])
async def test_costs_are_followed(is_led: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start under load is over when the load is.  Long steps make slices longer; steps as long as
    layers do not, nor does what is brief."""
    monkeypatch.setattr("epd.engine.device.slices.Stopwatch", Watch)
    monkeypatch.setattr(Watch, "now_s", 0.0)
    served = Served(is_led=is_led)
    served.load = 3.0
    assert await served.num_slices(4) == 12, "a layer fills more than half of a quantum"
    served.load = 1.0
    assert await served.num_slices(30) == 3
    assert await served.num_slices(20, step_s=LAYER_S) == 3
    assert await served.num_slices(20, brief_s=100.0) == 3
    assert await served.num_slices(100, step_s=100.0) == 1, "a share of a step is longer than a run"
    assert await served.executor.close()
