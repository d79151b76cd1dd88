"""Launch order, cancellation that owns its work, bounded queues, closing; and the event bridge."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest

from epd.config import EngineConfig
from epd.engine.base import DeviceLost, EngineError
from epd.engine.device.cuda_events import CudaEventBridge
from epd.engine.device.executor import Completion, Deliver, DeviceExecutor, Weight, _Job, _Threads
from epd.engine.factory import num_threads

PATIENCE_S = 30.0


class FakeEvent:
    """A CUDA event whose kernels end when the test says so."""

    def __init__(self) -> None:
        self.recorded_on = ""
        self.passed = threading.Event()
        self.fault: Exception | None = None

    def record(self) -> None:
        self.recorded_on = threading.current_thread().name

    def synchronize(self) -> None:
        assert self.passed.wait(PATIENCE_S)
        if self.fault:
            raise self.fault


class Events:
    """Makes events and remembers them in order."""

    def __init__(self) -> None:
        self.made: list[FakeEvent] = []

    def __call__(self) -> FakeEvent:
        self.made.append(FakeEvent())
        return self.made[-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_calls_run_in_launch_order_on_one_thread() -> None:
    executor = DeviceExecutor()
    ran: list[tuple[int, str]] = []

    def call(i: int) -> int:
        time.sleep(0.002 * (5 - i))  # later calls are shorter: order must not come from duration
        ran.append((i, threading.current_thread().name))
        return i * i

    futures = [executor.launch(call, i) for i in range(5)]
    assert await asyncio.gather(*futures[::-1]) == [16, 9, 4, 1, 0]
    assert [i for i, _ in ran] == list(range(5))
    assert len({name for _, name in ran}) == 1
    assert await executor.close()


async def test_it_is_at_rest_when_all_that_was_launched_has_passed() -> None:
    executor, gate = DeviceExecutor(), threading.Event()
    running = executor.launch(gate.wait)
    assert not await executor.rest(0.01)
    gate.set()
    assert await executor.rest() and running.done()
    await executor.close()


async def test_the_loop_and_the_pool_go_on_during_a_launch() -> None:
    executor = DeviceExecutor(num_pool_threads=2)
    gate = threading.Event()
    slow = executor.launch(gate.wait, PATIENCE_S)
    assert await executor.compute(lambda: 7) == 7
    both = threading.Barrier(2, timeout=PATIENCE_S)  # passes only if two pool threads run
    await asyncio.gather(executor.compute(both.wait), executor.compute(both.wait))
    assert not slow.done()
    gate.set()
    assert await slow is True
    await executor.close()


async def test_an_exception_fails_its_own_call() -> None:
    """Fault F14: the thread survives, also an exception that is no Exception."""
    executor = DeviceExecutor()

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("bad"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(EngineError if not isinstance(error, Exception) else ValueError):
            await executor.launch(fail, error)
    assert await executor.launch(lambda: 1) == 1
    await executor.close()


async def test_a_cancelled_call_still_owns_its_work() -> None:
    """It runs to its end, its arguments live until then, its result is dropped."""

    class Tensor:
        pass

    executor = DeviceExecutor()
    gate, ran = threading.Event(), threading.Event()
    executor.launch(gate.wait, PATIENCE_S)
    tensor = Tensor()
    alive = weakref.ref(tensor)
    future = executor.launch(lambda _: ran.set(), tensor)
    del tensor
    future.cancel()
    await asyncio.sleep(0)
    gc.collect()
    assert future.cancelled() and not ran.is_set() and alive() is not None
    gate.set()
    assert await executor.launch(lambda: "next") == "next"
    assert ran.is_set()
    gc.collect()
    assert alive() is None
    await executor.close()


async def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    class Tensor:
        pass

    executor = DeviceExecutor()
    tensor = Tensor()
    alive = weakref.ref(tensor)
    await executor.launch(lambda _: None, tensor)
    del tensor
    await until(lambda: gc.collect() >= 0 and alive() is None)
    await executor.close()


async def test_a_full_queue_refuses_at_once() -> None:
    executor = DeviceExecutor(max_queue=2)
    gate, started = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        gate.wait(PATIENCE_S)

    first = executor.launch(hold)
    await until(started.is_set)
    waiting = [executor.launch(lambda: 0), executor.launch(lambda: 0)]
    with pytest.raises(EngineError, match="2 calls waiting"):
        executor.launch(lambda: 0)
    gate.set()
    await asyncio.gather(first, *waiting)
    assert await executor.launch(lambda: 5) == 5
    await executor.close()


async def test_close_runs_what_is_queued_and_refuses_more() -> None:
    executor = DeviceExecutor()
    futures = [executor.launch(time.sleep, 0.01) for _ in range(3)]
    assert await executor.close() is True
    assert all(future.done() for future in futures)
    with pytest.raises(EngineError, match="closed"):
        executor.launch(lambda: 0)
    assert await executor.close() is True


async def test_close_is_bounded() -> None:
    executor = DeviceExecutor()
    gate = threading.Event()
    executor.launch(gate.wait, PATIENCE_S)
    started = time.monotonic()
    assert await executor.close(timeout_s=0.05) is False
    assert time.monotonic() - started < PATIENCE_S / 2  # not until the call has ended
    gate.set()


def test_a_loop_that_is_gone_harms_nobody() -> None:
    executor = DeviceExecutor()
    gate = threading.Event()

    async def start() -> None:
        executor.launch(gate.wait, PATIENCE_S)

    async def after() -> int:
        gate.set()
        value = await executor.launch(lambda: 3)
        await executor.close()
        return value

    asyncio.run(start())
    assert asyncio.run(after()) == 3


# --- completions by event -------------------------------------------------------------------------


async def test_a_result_waits_for_its_event() -> None:
    """Fault F2: what the call returned is not handed out before its kernels have run."""
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    first = executor.launch(lambda: "rows")
    second = executor.launch(lambda: "more")
    await until(lambda: len(events.made) == 2)  # the launch thread did not wait for the device
    assert all("launch" in event.recorded_on for event in events.made)
    await asyncio.sleep(0.01)
    assert not first.done() and not second.done()
    events.made[0].passed.set()
    assert await first == "rows"
    assert not second.done()
    events.made[1].passed.set()
    assert await second == "more"
    assert await executor.close()


async def test_a_cancelled_result_lives_until_its_event() -> None:
    class Tensor:
        pass

    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    made: list[weakref.ref[Tensor]] = []

    def call() -> Tensor:
        tensor = Tensor()
        made.append(weakref.ref(tensor))
        return tensor

    future = executor.launch(call)
    await until(lambda: len(events.made) == 1)
    future.cancel()
    gc.collect()
    assert made[0]() is not None
    events.made[0].passed.set()
    await until(lambda: gc.collect() >= 0 and made[0]() is None)
    await executor.close()


async def test_a_device_fault_fails_its_own_call() -> None:
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    bad = executor.launch(lambda: 1)
    good = executor.launch(lambda: 2)
    await until(lambda: len(events.made) == 2)
    events.made[0].fault = RuntimeError("illegal address")
    for event in events.made:
        event.passed.set()
    with pytest.raises(RuntimeError, match="illegal address"):
        await bad
    assert await good == 2
    await executor.close()


async def test_a_failed_call_waits_for_what_it_has_launched() -> None:
    """Its kernels still run: what they read must not be given out before they have ended."""
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))

    def fail() -> None:
        raise ValueError("half-way")

    failed = executor.launch(fail)
    await until(lambda: len(events.made) == 1)
    await asyncio.sleep(0.01)
    assert not failed.done()
    events.made[0].passed.set()
    with pytest.raises(ValueError, match="half-way"):
        await failed
    await executor.close()


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_a_thread_that_ends_by_itself_fails_whoever_waits(num_threads: int) -> None:
    """A device that cannot be made current: calls that came before and after are over at once."""
    may_start = threading.Event()

    def start() -> None:
        assert may_start.wait(PATIENCE_S)
        raise RuntimeError("no such device")

    threads = _Threads("device", num_threads, 16, Completion(), start)
    before = [threads.submit(int, ()) for _ in range(3)]
    may_start.set()
    for future in before:
        with pytest.raises(DeviceLost, match="no such device"):
            await asyncio.wait_for(future, PATIENCE_S)
    with pytest.raises(DeviceLost, match="no such device"):
        await asyncio.wait_for(threads.submit(int, ()), PATIENCE_S)


async def test_what_raises_around_a_call_fails_the_call_and_all_behind_it() -> None:
    def around(self: _Threads, job: object) -> None:
        raise KeyError("a slip of ours")

    with mock.patch.object(_Threads, "_run", around):
        threads = _Threads("device", 1, 16, Completion())
        futures = [threads.submit(int, ()) for _ in range(3)]
        for future in futures:
            with pytest.raises(DeviceLost, match="a slip of ours"):
                await asyncio.wait_for(future, PATIENCE_S)


async def test_long_calls_that_were_put_off_fail_with_the_thread() -> None:
    """One after which a slip comes, while two others wait for its end."""
    queued = threading.Event()
    run = _Threads._run

    def around(self: _Threads, job: _Job) -> None:
        run(self, job)
        raise KeyError("a slip of ours")

    def long() -> None:
        assert queued.wait(PATIENCE_S)
        threads._is_due = True
        threads.give_way()

    with mock.patch.object(_Threads, "_run", around):
        threads = _Threads("device", 1, 16, Completion())
        futures = [threads.submit(long, (), Weight.LONG)]
        futures += [threads.submit(int, (), Weight.LONG) for _ in range(2)]
        queued.set()
        assert await asyncio.wait_for(futures[0], PATIENCE_S) is None
        for future in futures[1:]:
            with pytest.raises(DeviceLost, match="a slip of ours"):
                await asyncio.wait_for(future, PATIENCE_S)


async def test_a_device_that_cannot_be_asked_is_lost() -> None:
    class Deaf(Completion):
        def works(self) -> bool:
            raise RuntimeError("the driver is gone")

    executor = DeviceExecutor(completion=Deaf())
    with pytest.raises(DeviceLost, match="division"):
        await asyncio.wait_for(executor.launch(lambda: 1 // 0), PATIENCE_S)
    assert await executor.launch(lambda: 7) == 7  # the thread goes on
    assert await executor.close()


async def test_a_sticky_error_is_told_from_a_failed_call() -> None:
    """Fault F49: after it the device fails everything, and whoever serves with it must know."""
    events, works = Events(), [True]
    executor = DeviceExecutor(completion=CudaEventBridge(events, works=lambda: works[0]))
    calls = []
    for still_works in (True, False):
        calls.append(executor.launch(lambda: 1))
        await until(lambda: len(events.made) == len(calls))
        works[0] = still_works
        events.made[-1].fault = RuntimeError("an illegal memory access")
        events.made[-1].passed.set()
        with pytest.raises(Exception, match="illegal memory access") as raised:
            await calls[-1]
        assert isinstance(raised.value, DeviceLost) is not still_works
    await executor.close()


async def test_an_event_that_cannot_be_recorded_fails_its_own_call() -> None:
    class Broken:
        def watch(self, deliver: Deliver, lane: str = "") -> None:
            raise RuntimeError("no device")

        def works(self) -> bool:
            return True

        def close(self, timeout_s: float) -> None:
            pass

    executor = DeviceExecutor(completion=Broken())
    with pytest.raises(RuntimeError, match="no device"):
        await executor.launch(lambda: 1)
    await executor.close()


async def test_pool_calls_need_no_event() -> None:
    events = Events()
    executor = DeviceExecutor(completion=CudaEventBridge(events))
    assert await executor.compute(lambda: 9) == 9
    assert events.made == []
    await executor.close()


@pytest.mark.parametrize(
    ("num_ranks", "affinity", "expected"),
    [(1, "", 8), (2, "", 8), (4, "", 4), (32, "", 1), (1, "0-15", 15), (2, "0-15", 7)],
)
def test_ranks_share_out_the_cpus(num_ranks: int, affinity: str, expected: int) -> None:
    """Of 16; an instance that shares them with others takes half at most."""
    assert num_threads(EngineConfig(cpu_affinity=affinity), 16, num_ranks) == expected
    assert num_threads(EngineConfig(cpu_affinity=affinity, threads=3), 16, num_ranks) == 3
