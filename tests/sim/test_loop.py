"""Virtual time, processes, and what may not be reached from inside."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epd_lab.sim.core.guard import no_escape
from epd_lab.sim.core.loop import Deadlock, SimLoop, SimulationEscape, StepLimitReached
from epd_lab.sim.core.process import SimProcess


def start(loop: SimLoop, process: SimProcess, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return loop.create_task(work, context=process.context)


@pytest.fixture
def loop() -> Any:
    loop = SimLoop()
    yield loop
    loop.freeze()


def test_time_jumps_and_real_time_does_not_pass(loop: SimLoop) -> None:
    async def sleep_for_a_day() -> float:
        await asyncio.sleep(86_400)
        return loop.time()

    started = time.perf_counter()
    assert loop.run_until_complete(sleep_for_a_day()) == 86_400
    assert time.perf_counter() - started < 1


def test_equal_times_keep_their_order(loop: SimLoop) -> None:
    seen: list[int] = []
    for index in range(100):
        loop.call_at(1.0, seen.append, index)
    loop.run_until(2.0)
    assert seen == list(range(100))


def test_a_kill_runs_no_finally(loop: SimLoop) -> None:
    process = SimProcess("e0", 1, 100)
    seen: list[str] = []

    async def work() -> None:
        try:
            async with asyncio.timeout(50):
                await asyncio.sleep(10)
        finally:
            seen.append("finally")

    async def nested() -> None:
        await asyncio.gather(work(), work())  # tasks of tasks belong to the process as well

    start(loop, process, nested())
    loop.call_at(5.0, loop.kill, process)
    loop.run_until(100.0)
    assert seen == []
    loop.freeze()


def test_a_stall_delays_in_order_and_timers_catch_up(loop: SimLoop) -> None:
    process, other = SimProcess("p0", 1, 100), SimProcess("d0", 1, 101)
    seen: list[tuple[str, float, int]] = []

    async def tick(name: str) -> None:
        for index in range(4):
            await asyncio.sleep(1.0)
            seen.append((name, loop.time(), index))

    start(loop, process, tick("p"))
    start(loop, other, tick("d"))
    loop.call_at(1.5, loop.stall, process)
    loop.call_at(3.25, loop.resume, process)
    loop.run_until(20.0)
    assert [t for name, t, _ in seen if name == "p"] == [1.0, 3.25, 4.25, 5.25]
    assert [t for name, t, _ in seen if name == "d"] == [1.0, 2.0, 3.0, 4.0]


def test_a_future_set_by_another_process_wakes_the_owner_only_if_it_lives(loop: SimLoop) -> None:
    process = SimProcess("d0", 1, 1)
    future = loop.create_future()
    seen: list[str] = []

    async def wait() -> None:
        await future
        seen.append("woken")

    start(loop, process, wait())
    loop.run_until(0.1)
    loop.kill(process)
    future.set_result(None)
    loop.run_until(1.0)
    assert seen == []


def test_deadlock_tells_the_stories(loop: SimLoop) -> None:
    loop.describe = lambda: "REQUEST r1 WAITING"

    async def wait_for_nothing() -> None:
        await loop.create_future()

    with pytest.raises(Deadlock, match="REQUEST r1 WAITING"):
        loop.run_until_complete(wait_for_nothing())


def test_a_busy_loop_is_found(loop: SimLoop) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StepLimitReached):
        loop.run_until_complete(spin())


@pytest.mark.parametrize(
    "reach",
    [
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.create_connection(None, "localhost", 80),
        lambda loop: loop.subprocess_exec(None, "true"),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: loop.add_signal_handler(15, print),
    ],
)
def test_real_io_raises(loop: SimLoop, reach: Callable[[SimLoop], Any]) -> None:
    with pytest.raises(SimulationEscape):
        reach(loop)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.time()",
        "import time; time.monotonic()",
        "import time; time.sleep(0)",
        "import random; random.random()",
        "import os; os.urandom(4)",
        "import uuid; uuid.uuid4()",
        "import threading; threading.Thread(target=print).start()",
    ],
)
def test_the_real_world_raises_for_roles_and_not_for_others(code: str) -> None:
    with no_escape():
        exec(code.replace("target=print", "target=str"), {"__name__": "logging"})
        with pytest.raises(SimulationEscape, match=r"epd\.roles\.decode\.role called"):
            exec(code, {"__name__": "epd.roles.decode.role"})
    exec(code.replace("target=print", "target=str"), {"__name__": "epd.roles.decode.role"})


def test_sets_of_tasks_iterate_in_order_of_birth(loop: SimLoop) -> None:
    async def main() -> bool:
        async def nothing() -> None:
            await asyncio.sleep(1)

        tasks = [asyncio.ensure_future(nothing()) for _ in range(50)]
        return [task.get_name() for task in set(tasks)] == [t.get_name() for t in tasks]

    assert loop.run_until_complete(main())


def test_context_of_a_process_is_inherited(loop: SimLoop) -> None:
    process = SimProcess("g", 1, 1)
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")
    process.context.run(mark.set, "mine")
    seen: list[str] = []
    loop.call_later(1.0, lambda: seen.append(mark.get()), context=process.context)
    loop.run_until(2.0)
    assert seen == ["mine"]
