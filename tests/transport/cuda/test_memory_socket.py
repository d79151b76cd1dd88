"""Descriptors over a unix socket: who may have one, and what is left of who has gone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from epd.transport.cuda.memory_socket import KIND, MemoryQuestion, MemorySocket
from epd.transport.region import WriteRefused
from tests.fsm.tables import REGION
from tests.patience import PATIENCE_S
from tests.transport.device_family import until


def question(instance_id: str = "writer") -> bytes:
    return msgspec.msgpack.encode(MemoryQuestion(instance_id, 1, REGION))


def sockets() -> set[str]:
    """Of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in found if link.startswith("socket:")}


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[MemorySocket]:
    def export(asked: MemoryQuestion) -> int:
        if asked.region != REGION:
            raise WriteRefused("it is not here")
        return os.open("/dev/null", os.O_RDONLY)

    made = MemorySocket(str(tmp_path), export)
    yield made
    made.close()


@contextmanager
def caller(owner: MemorySocket, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, KIND | socket.SOCK_NONBLOCK) as wire:
        wire.connect(str(tmp_path / owner.name))
        yield wire


async def answer(wire: socket.socket) -> bytes:
    """Empty when it was hung up."""
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.get_running_loop().sock_recv(wire, 1 << 10)


async def test_of_who_has_gone_nothing_is_left(owner: MemorySocket, tmp_path: Path) -> None:
    before = sockets()
    with caller(owner, tmp_path), caller(owner, tmp_path) as wire:
        wire.send(question())
        assert await answer(wire) == b"mapped"
        await until(lambda: len(sockets() - before) == 4)  # either end of either
    await until(lambda: sockets() <= before)


async def test_who_asks_twice_is_hung_up_on(owner: MemorySocket, tmp_path: Path) -> None:
    with caller(owner, tmp_path) as wire:
        for expected in (b"mapped", b""):
            wire.send(question())
            assert await answer(wire) == expected


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"noise", b""),
        (msgspec.msgpack.encode(MemoryQuestion("writer", 1, structs.replace(REGION, epoch=2))),
         b"it is not here"),
        (question("barred"), b"its owner has fenced this instance"),
    ],
)  # fmt: skip
async def test_who_gets_nothing_is_told_why_and_hung_up_on(
    owner: MemorySocket, tmp_path: Path, said: bytes, reason: bytes
) -> None:
    assert owner.bar(("barred", 1)), "nobody of that life has mapped anything"
    with caller(owner, tmp_path) as wire:
        wire.send(said)
        told = await answer(wire)
        assert told != b"mapped" and told.startswith(reason)
        assert await answer(wire) == b""


async def test_who_lives_may_write_until_its_process_ends(
    owner: MemorySocket, tmp_path: Path
) -> None:
    with caller(owner, tmp_path) as wire:
        wire.send(question())
        assert await answer(wire) == b"mapped"
        assert not owner.bar(("writer", 1)), "it is this process"
        owner.withdraw(REGION)
        assert await answer(wire) == b""
        assert owner.bar(("writer", 1), has_ended=True), "by its own word"
