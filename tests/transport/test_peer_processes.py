"""TCP, files, mooncake and NIXL between real processes that die, freeze and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import TransferEngine, WriteFailed, WriteUnknown, Written
from epd.transport.host import this_host_id
from tests.contract.transfer_kit import GUARD, guard, pattern
from tests.patience import PATIENCE_S

CHILD = str(Path(__file__).with_name("engine_child.py"))
ROOT = str(Path(__file__).parents[2])
BACKENDS = ("tcp", "file", "mooncake", "nixl")
GUARDED = bytes([GUARD])


class Family:
    """This process's engine and child processes, over one backend."""

    def __init__(self, backend: str, directory: str) -> None:
        self.backend = backend
        self.directory = directory
        self._children: dict[int, subprocess.Popen[str]] = {}
        self._engines: list[TransferEngine] = []

    def engine(self, instance_id: str, epoch: int = 1) -> Any:
        settings = BackendSettings(instance_id, epoch, True, directory=self.directory)
        engine = named(self.backend).make(settings)
        self._engines.append(engine)
        return engine

    async def child(self, what: str, instance_id: str, *more: str) -> tuple[int, str]:
        """Its pid and its first line."""
        process = subprocess.Popen(
            # -P: a folder of tests beside it is called mooncake.
            [sys.executable, "-P", CHILD, self.backend, self.directory, what, instance_id, *more],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # else the kernel may hang up pytest: see `Remote`
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        self._children[process.pid] = process
        assert process.stdout is not None
        return process.pid, await asyncio.to_thread(process.stdout.readline)

    async def owner(self, epoch: int = 1) -> tuple[int, RemoteRegion]:
        pid, line = await self.child("own", "consumer", str(epoch))
        return pid, msgspec.json.decode(line, type=RemoteRegion)

    async def writer(self, target: RemoteRegion) -> int:
        descriptor = msgspec.json.encode(target).decode()
        pid, line = await self.child("write", "producer", "4", descriptor)
        assert line == "writing\n"
        return pid

    async def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._children[pid].wait)

    async def close(self) -> None:
        for process in self._children.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for engine in self._engines:
            await engine.close()


@pytest.fixture(params=BACKENDS)
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Family]:
    if reason := named(request.param).lacks():
        pytest.skip(reason)
    made = Family(request.param, str(tmp_path))
    yield made
    await made.close()


async def fenced_within(engine: TransferEngine, peer: Address, pid: int, timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if await engine.fence(peer, this_host_id(), pid):
            return True
        await asyncio.sleep(0.02)
    return False


async def nothing_lands(region: Any) -> None:
    guard(region)
    await asyncio.sleep(0.3)
    assert bytes(region.buffer) == GUARDED * region.buffer.nbytes, "a byte landed after the fence"


PRODUCER = Address("producer", 4, "")
CONSUMER = Address("consumer", 1, "")


async def test_a_writer_killed_in_the_middle_of_writes_is_fenced(family: Family) -> None:
    consumer = family.engine("consumer")
    region = consumer.allocate("pool", 16, 1 << 20)
    pid = await family.writer(region.remote)
    await asyncio.sleep(0.02)
    await family.kill(pid)
    assert await fenced_within(consumer, PRODUCER, pid, PATIENCE_S)
    await nothing_lands(region)


async def test_a_frozen_writer_writes_nothing_after_its_fence(family: Family) -> None:
    """Fault F7: the fence may have to wait, but once it holds, thawing changes nothing."""
    consumer = family.engine("consumer")
    region = consumer.allocate("pool", 16, 1 << 20)
    pid = await family.writer(region.remote)
    os.kill(pid, signal.SIGSTOP)
    fenced = await fenced_within(consumer, PRODUCER, pid, 0.3)
    assert fenced or family.backend in {"mooncake", "nixl"}
    if fenced:
        guard(region)
    os.kill(pid, signal.SIGCONT)
    if fenced:
        await asyncio.sleep(0.3)
        assert bytes(region.buffer) == GUARDED * region.buffer.nbytes
    else:  # the write under way had to end first
        assert await fenced_within(consumer, PRODUCER, pid, PATIENCE_S)
        await nothing_lands(region)


async def test_a_killed_owner_fails_writes_and_is_fenced(family: Family) -> None:
    producer = family.engine("producer")
    pid, target = await family.owner()
    data = pattern(1 << 20)
    assert isinstance(await producer.write([data], target, (3,)), Written)
    await family.kill(pid)
    outcome = await producer.write([data], target, (3,))
    if family.backend != "file":  # a file outlives its reader
        assert isinstance(outcome, WriteFailed), outcome
    assert await fenced_within(producer, CONSUMER, pid, PATIENCE_S)


async def test_an_owner_killed_in_the_middle_of_a_write(family: Family) -> None:
    producer = family.engine("producer")
    pid, target = await family.owner()
    data = pattern(16 << 20)
    for _ in range(3):
        under_way = asyncio.create_task(producer.write([data], target, range(16)))
        await asyncio.sleep(0.003)
        if not under_way.done():
            break
    await family.kill(pid)
    async with asyncio.timeout(PATIENCE_S):
        outcome = await under_way
    assert isinstance(outcome, Written | WriteFailed | WriteUnknown)
    assert await fenced_within(producer, CONSUMER, pid, PATIENCE_S)


async def test_a_frozen_owner(family: Family) -> None:
    """Nobody can tell it from a slow one: the writer gives up and keeps its source."""
    if family.backend == "file":
        pytest.skip("a write through a directory needs no living reader")
    producer = family.engine("producer")
    pid, target = await family.owner()
    data = pattern(16 << 20)
    assert isinstance(await producer.write([data], target, range(16)), Written)
    producer._stall_timeout_s = producer._answer_timeout_s = producer._begin_timeout_s = 0.5
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        outcome = await producer.write([data], target, range(16))
    if family.backend == "tcp":
        assert isinstance(outcome, WriteUnknown)
        assert not await fenced_within(producer, CONSUMER, pid, 1.0)
    else:
        assert isinstance(outcome, WriteFailed)  # it did not say that the write may begin
    os.kill(pid, signal.SIGCONT)
    assert await fenced_within(producer, CONSUMER, pid, PATIENCE_S)


async def test_a_restarted_owner_is_another(family: Family) -> None:
    """Fault F44."""
    producer = family.engine("producer")
    pid, old = await family.owner(1)
    assert isinstance(await producer.write([b"x"], old, (3,)), Written)
    await family.kill(pid)
    _, new = await family.owner(2)
    assert isinstance(await producer.write([b"x"], old, (3,)), WriteFailed)
    assert isinstance(await producer.write([b"x"], new, (3,)), Written)
