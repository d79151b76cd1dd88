"""Real forks: what a worker says arrives, ends are told, and a dead zygote takes nobody with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator

import msgspec
import psutil
import pytest

from epd.config import EngineConfig, InstanceConfig
from epd.runtime import zygote as zygotes
from epd.runtime.child import ChildSpec, StatusLine, _watch_stdin
from epd.runtime.supervisor import _lines_of
from epd.runtime.worker import Ending
from epd.runtime.zygote import LOST, Zygote, ZygoteLost
from epd.tiny import CHECKPOINT
from tests.api.wire import until
from tests.e2e.server import is_alive

TIMEOUT_S = 110.0  # pytest's own is 120: on a busy machine a start takes half a minute


def spec() -> bytes:
    instance = InstanceConfig(
        instance_id="p0",
        roles=("prefill",),
        model_dir="nowhere",
        endpoint="ipc:///nowhere",
        gateway_endpoint="ipc:///nowhere",
        engine=EngineConfig(),
    )
    return msgspec.json.encode(ChildSpec("p0", instance)) + b"\n"


@pytest.fixture
async def zygote(request: pytest.FixtureRequest) -> AsyncIterator[Zygote]:
    """One that imports nothing of a model, unless a test names one."""
    zygote = Zygote(getattr(request, "param", "nowhere"))
    async with asyncio.timeout(TIMEOUT_S):
        yield zygote
        await zygote.close()


def zygote_pid(pid: int) -> int:
    return psutil.Process(pid).ppid()


@pytest.mark.parametrize(
    "zygote",
    [pytest.param(str(CHECKPOINT), marks=pytest.mark.long, id="tiny"), "nowhere"],
    indirect=True,
)
async def test_forks_run_signals_reach_them_and_a_dead_zygote_is_replaced(zygote: Zygote) -> None:
    first, second, third = [await zygote.fork() for _ in range(3)]
    assert len({first.pid, second.pid, third.pid, os.getpid()}) == 4
    assert psutil.Process(zygote_pid(first.pid)).num_threads() == 1  # others would be lost

    first.stdin.write(spec())
    lines = [msgspec.json.decode(line, type=StatusLine) async for line in first.stdout]
    assert [line.state for line in lines] == ["loading", "failed"]
    assert "nowhere" in lines[-1].detail
    assert await first.wait() == first.returncode == 1

    assert second.returncode is None
    second.send_signal(signal.SIGKILL)
    assert await second.wait() == -signal.SIGKILL
    second.send_signal(signal.SIGTERM)  # too late, and to nobody else

    zygote._model_dir = "nowhere"  # the next one need not import as much
    first_mother = zygote_pid(third.pid)
    os.kill(first_mother, signal.SIGKILL)
    fourth = await zygote.fork()
    mother = zygote_pid(fourth.pid)
    assert mother != first_mother
    fourth.stdin.close()  # as when the supervisor dies: the worker has nothing to be
    assert await fourth.wait() != 0

    assert third.returncode is None  # it lives, listens, and its end is noticed
    third.stdin.write(spec())
    assert b"loading" in await third.stdout.readline()
    assert await third.wait() == LOST
    await zygote.close()
    await until(lambda: not psutil.pid_exists(mother))
    with pytest.raises(ZygoteLost, match="forks workers"):
        await zygote.fork()


async def test_a_dead_zygote_with_workers_is_replaced_before_anybody_asks(zygote: Zygote) -> None:
    worker = await zygote.fork()
    mother = zygote_pid(worker.pid)
    os.kill(mother, signal.SIGKILL)
    await a_zygote_other_than({mother})
    assert worker.returncode is None
    await zygote.close()
    assert worker.returncode == LOST
    while is_alive(worker.pid):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_kills", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_a_zygote_that_dies_while_it_imports_is_replaced_once(
    zygote: Zygote, num_kills: int
) -> None:
    forking = asyncio.ensure_future(zygote.fork())
    killed: set[int] = set()
    for _ in range(num_kills):
        pid = await a_zygote_other_than(killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    if num_kills == 1:
        assert zygote_pid((await forking).pid) not in killed
    else:
        with pytest.raises(ZygoteLost):
            await forking


async def test_a_zygote_that_hangs_is_killed_and_replaced(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault F69's neighbour: nobody waits without a limit, be it for a fork or for how one ended,
    and also not for one that has not begun to fork."""
    worker, other = [await zygote.fork() for _ in range(2)]
    mother = zygote_pid(worker.pid)
    monkeypatch.setattr(zygotes, "ANSWER_LIMIT_S", 0.2)
    os.kill(mother, signal.SIGSTOP)
    successor = await zygote.fork()
    second = zygote_pid(successor.pid)
    assert second != mother and not is_alive(mother)
    other.send_signal(signal.SIGKILL)
    assert await other.wait() == LOST, "its zygote is gone: nobody can tell how"
    successor._word_limit_s = 0.2
    os.kill(second, signal.SIGSTOP)
    successor.send_signal(signal.SIGKILL)
    assert await successor.wait() == LOST, "its zygote stands still: the kernel tells when"
    while is_alive(second):
        await asyncio.sleep(0.01)
    third = await a_zygote_other_than({mother, second})
    monkeypatch.setattr(zygotes, "START_LIMIT_S", 0.5)
    os.kill(third, signal.SIGSTOP)
    with pytest.raises(ZygoteLost):
        await stopping_all(zygote, {third})
    assert worker.returncode is None


async def stopping_all(zygote: Zygote, stopped: set[int]) -> None:
    """Fork while every zygote stands still before it is ready."""
    forking = asyncio.ensure_future(zygote.fork())
    while not forking.done():
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.pid not in stopped and "epd.runtime.zygote" in process.cmdline():
                    process.suspend()
                    stopped.add(process.pid)
        await asyncio.sleep(0.01)
    forking.result()


async def a_zygote_other_than(pids: set[int]) -> int:
    while True:
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.pid not in pids and "epd.runtime.zygote" in process.cmdline():
                    return process.pid
        await asyncio.sleep(0.01)


async def test_closing_while_it_still_imports_ends_who_waits(zygote: Zygote) -> None:
    forking = asyncio.ensure_future(zygote.fork())
    await asyncio.sleep(0.1)
    await zygote.close()
    with pytest.raises(ZygoteLost):
        await forking


async def test_a_worker_ends_with_a_supervisor_that_had_not_read_all(zygote: Zygote) -> None:
    """A socket with unread words is not ended but reset, on either side."""
    worker = await zygote.fork()
    worker.stdin.write(spec())
    await asyncio.sleep(0.05)  # its words arrive, nobody reads them
    worker.stdin.transport.abort()
    assert await worker.wait() is not None
    unread = await zygote.fork()
    unread.send_signal(signal.SIGSTOP)
    unread.stdin.write(spec())
    await asyncio.sleep(0.05)
    unread.send_signal(signal.SIGKILL)
    assert [line async for line in _lines_of(unread.stdout)] == []
    assert await unread.wait() == -signal.SIGKILL


def test_a_reset_lifeline_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    theirs.send(b"unread")
    ours.send(b"unread, too")
    loop = asyncio.new_event_loop()
    ending = Ending()
    kept = os.dup(0)
    os.dup2(ours.fileno(), 0)
    try:
        theirs.close()
        loop.run_until_complete(_watched(ending))
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        ours.close()
        loop.close()
    assert ending.now.is_set()


async def _watched(ending: Ending) -> None:
    _watch_stdin(ending, lambda state, detail: None)
    async with asyncio.timeout(TIMEOUT_S):
        await ending.now.wait()
