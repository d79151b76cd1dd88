"""A child that may die: each way to die is an outcome, and the next piece of work is done (F66)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from epd.api.expendable.fork_server import ChildBounds
from epd.api.expendable.work import Cause, Died, ForkServer, ServerLost, WorkDone

BOUNDS = ChildBounds(cpu_s=0.2, wall_s=30.0, memory_nbytes=64 << 20, stack_nbytes=1 << 20)
SHORT = ChildBounds(cpu_s=30.0, wall_s=0.2, memory_nbytes=64 << 20, stack_nbytes=1 << 20)


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    made = ForkServer("tests.api.deadly_work", "hello ")
    yield made
    await made.close()


async def test_each_death_is_an_outcome(server: ForkServer) -> None:
    large = bytes(3 << 20)
    assert await server.run(large, BOUNDS) == WorkDone(b"hello " + large)
    for request, bounds, cause in (
        (b"loop", BOUNDS, Cause.TIME),
        (b"sleep", SHORT, Cause.STALL),
        (b"take 99999999", BOUNDS, Cause.MEMORY),
        (b"crash", BOUNDS, Cause.CRASH),
        (b"abort", BOUNDS, Cause.MEMORY),
    ):
        outcomes = await asyncio.gather(server.run(request, bounds), server.run(b"you", BOUNDS))
        assert outcomes == [Died(b"begun", cause), WorkDone(b"hello you")], request


async def test_a_server_that_is_lost_is_started_again(server: ForkServer) -> None:
    with pytest.raises(ServerLost):
        await server.run(b"end server", BOUNDS)  # twice
    assert await server.run(b"you", BOUNDS) == WorkDone(b"hello you")
    await server.close()
    with pytest.raises(ServerLost):
        await server.run(b"you", BOUNDS)


OWNER = """
import asyncio
from epd.api.expendable.work import ForkServer
from tests.api.expendable.test_expendable import SHORT
async def main():
    server = ForkServer("tests.api.deadly_work", "")
    await server.run(b"x", SHORT)
    asyncio.create_task(server.run(b"sleep", SHORT.__class__(30.0, 30.0, 1 << 26, 1 << 20)))
    await asyncio.sleep(0.05)
    print("begun", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_nothing_is_left_of_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"begun\n"
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) == 2  # the server, and who sleeps
        os.kill(owner.pid, signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=20)[1] == []
