"""What must wait for a fence, and what may not get past it, one step at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from epd.messages import Address
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import TransportError, WriteFailed, WriteUnknown, Written
from epd.transport.files.backend import FileTransferEngine
from epd.transport.files.whole_file import write_whole
from epd.transport.host import (
    TcpSocket,
    has_half_closed_arrivals,
    is_process_dead,
    this_boot_id,
    this_host_id,
)
from epd.transport.linked import leave, links
from epd.transport.linked.leave import End, FarRegion, LeaveEngine, Moved, WritePiece
from epd.transport.nixl.library import LIMIT_MS
from epd.transport.shm.backend import ShmTransferEngine
from epd.transport.tcp import TcpTransferEngine
from tests.contract.transfer_kit import GUARD, guard
from tests.patience import PATIENCE_S

WRITER = Address("writer", 3, "")
OWNER = Address("owner", 1, "")


async def test_a_file_of_a_barred_life_that_appears_late_is_removed_unread(tmp_path: Path) -> None:
    """The writer was frozen between its last look at the mark and its rename."""
    owner = FileTransferEngine(BackendSettings("owner", 1, directory=str(tmp_path)))
    region = owner.allocate("pool", 2, 64)
    guard(region)

    def arrive(writer: str, byte: bytes) -> Path:
        path = Path(tmp_path, region.remote.locator, f"{len(writer):020d}-{writer}-0123abcd.rows")
        note = msgspec.msgpack.encode((0,))
        write_whole(str(path), note, [memoryview(byte * 64)], checksum=False, durable=False)
        return path

    assert await owner.fence(WRITER, "", 0)
    late = arrive("writer-3", b"\x11")
    assert b"".join(region.views((0, 1), 128)) == bytes([GUARD]) * 128
    assert not late.exists()
    arrive("writer-30", b"\x22")  # another life
    assert bytes(region.views((0,), 64)[0]) == b"\x22" * 64
    await owner.close()
    assert os.listdir(tmp_path) == []


async def test_a_torn_or_strange_file_in_a_region_is_no_write(tmp_path: Path) -> None:
    owner = FileTransferEngine(BackendSettings("owner", 1, directory=str(tmp_path)))
    region = owner.allocate("pool", 1, 64)
    guard(region)
    name = f"{1:020d}-writer-3-0123abcd.rows"
    for content in (b"", b"EPDFILE1", os.urandom(200)):
        Path(tmp_path, region.remote.locator, name).write_bytes(content)
        assert bytes(region.views((0,), 64)[0]) == bytes([GUARD]) * 64
    await owner.close()


async def test_a_region_whose_directory_is_gone_says_so(tmp_path: Path) -> None:
    owner = FileTransferEngine(BackendSettings("owner", 1, directory=str(tmp_path)))
    tmp_path.rmdir()
    with pytest.raises(TransportError, match="cannot be made: No such file or directory"):
        owner.allocate("pool", 2, 64)
    await owner.close()


async def test_what_is_revoked_while_it_is_summed_up_was_not_written() -> None:
    owner = TcpTransferEngine(BackendSettings("owner", 1))
    writer = TcpTransferEngine(BackendSettings("writer", 1, True))
    begun, may_end, its_own = asyncio.Event(), asyncio.Event(), owner._copier.checksum

    async def slow(views: Sequence[memoryview]) -> int:
        begun.set()
        await may_end.wait()
        return await its_own(views)

    owner._copier.checksum = slow  # type: ignore[method-assign]
    region = owner.allocate("pool", 2, 64)
    write = asyncio.create_task(writer.write([b"x" * 64], region.remote, (1,)))
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        owner.revoke(region)
        may_end.set()
        outcome = await write
    assert isinstance(outcome, WriteFailed)
    assert "revoked meanwhile" in outcome.reason
    await writer.close()
    await owner.close()


async def test_shared_memory_cannot_fence_whose_host_is_not_known(tmp_path: Path) -> None:
    """Whose life has left no trace here: it ran on another host, or its lock was swept (F65)."""
    owner = ShmTransferEngine(BackendSettings("owner", 1), str(tmp_path))
    asked = (("", 0), (this_host_id(), os.getpid()), (f"not {this_host_id()}", 1))
    assert [await owner.fence(WRITER, *where) for where in asked] == [False, False, True]
    await owner.close()


# --- movers: mooncake, NIXL -----------------------------------------------------------------------


class Held:
    """A transfer that ends when it is told to, and how."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = End.DONE
        self._released = threading.Event()

    def transfer(self, to: FarRegion, pieces: Sequence[WritePiece]) -> Moved:
        self.begun.set()
        assert self._released.wait(10)
        return Moved(self.end)

    def release(self, end: End) -> None:
        self.end = end
        self._released.set()


Make = Callable[[str, int], LeaveEngine]


@pytest.fixture(params=["mooncake", "nixl"])
def make(request: pytest.FixtureRequest) -> Make:
    backend = named(request.param)
    if reason := backend.lacks():
        pytest.skip(reason)
    return lambda name, epoch: cast("LeaveEngine", backend.make(BackendSettings(name, epoch)))


async def begin(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> tuple[LeaveEngine, LeaveEngine, Held, asyncio.Task[Any], Any]:
    owner, writer = make("owner", 1), make("writer", 3)
    region = owner.allocate("pool", 1, 64)
    held = Held()
    monkeypatch.setattr(writer._mover, "transfer", held.transfer)
    write = asyncio.create_task(writer.write([bytes(64)], region.remote, (0,)))
    await asyncio.to_thread(held.begun.wait, 10)
    return owner, writer, held, write, region


async def test_an_open_write_keeps_the_fence_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, writer, held, write, region = await begin(make, monkeypatch)
    for _ in range(3):  # however often: time is no fence (F7)
        assert not await owner.fence(WRITER, this_host_id(), os.getpid())
    held.release(End.DONE)
    assert isinstance(await write, Written)
    async with asyncio.timeout(PATIENCE_S):
        while not await owner.fence(WRITER, this_host_id(), os.getpid()):
            await asyncio.sleep(0.01)
    outcome = await writer.write([bytes(64)], region.remote, (0,))
    assert isinstance(outcome, WriteFailed) and "fenced" in outcome.reason
    await writer.close()
    await owner.close()


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_broken_write_is_settled_with_a_living_owner(
    make: Make, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """Unknown at the writer until the owner has read what was on its way."""
    owner, writer, held, write, _ = await begin(make, monkeypatch)
    held.release(End.BROKEN)
    assert isinstance(await write, WriteUnknown)
    monkeypatch.setattr(leave, "has_half_closed_arrivals", lambda carries: True)
    assert not await writer.fence(OWNER, this_host_id(), os.getpid())
    assert not await owner.fence(WRITER, this_host_id(), os.getpid())
    monkeypatch.setattr(leave, "has_half_closed_arrivals", lambda carries: False)
    assert await (
        writer.fence(OWNER, this_host_id(), os.getpid()) if fenced else writer.settle(OWNER)
    )
    assert await owner.fence(WRITER, this_host_id(), os.getpid())
    await writer.close()
    await owner.close()


async def test_what_does_not_end_is_owned_as_long_as_the_owner_lives(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, writer, held, write, _ = await begin(make, monkeypatch)
    held.release(End.ENDLESS)
    assert isinstance(await write, WriteUnknown)
    assert not await writer.settle(OWNER)
    assert not await writer.fence(OWNER, this_host_id(), os.getpid())
    assert not await owner.fence(WRITER, this_host_id(), os.getpid())
    await writer.close()
    await owner.close()


async def test_an_end_that_was_not_heard_is_told_with_a_later_write(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it ended while a write was being begun that did not tell of it: what the owner
    holds as begun no fence ever ends."""
    owner, writer, held, write, region = await begin(make, monkeypatch)
    (wire,) = owner._links._inbound["writer", 3]
    late: list[Any] = []
    wire.on_frame = lambda wire, frame: late.append(frame)
    second = asyncio.create_task(writer.write([bytes(64)], region.remote, (0,)))
    async with asyncio.timeout(PATIENCE_S):
        while not late:
            await asyncio.sleep(0.001)
        held.release(End.DONE)
        assert isinstance(await write, Written)
        wire.on_frame = owner._on_frame
        owner._on_frame(wire, late[0])
        await second
        await writer.write([bytes(64)], region.remote, (0,))
        while not await owner.fence(WRITER, this_host_id(), os.getpid()):
            await asyncio.sleep(0.01)
    await writer.close()
    await owner.close()


@pytest.mark.parametrize("end", [End.DONE, End.ENDLESS])
async def test_what_another_host_cannot_move_any_more_its_next_life_attests(
    make: Make, monkeypatch: pytest.MonkeyPatch, end: End
) -> None:
    """Either way: of a writer that has ended, and of an owner.  Nothing else ends the doubt."""
    monkeypatch.setattr(links, "this_host_id", lambda: "there")
    owner, writer, held, write, region = await begin(make, monkeypatch)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    if end is End.DONE:  # by then it is too late
        asks, lost = owner, WRITER
        successor, target = make("writer", 4), region
    else:
        held.release(end)
        assert isinstance(await write, WriteUnknown)
        asks, lost = writer, OWNER
        successor, target = make("owner", 2), None
    assert not await asks.fence(lost, "there", ended.pid)
    if target is not None:
        assert isinstance(await successor.write([bytes(64)], target.remote, (0,)), Written)
    else:
        monkeypatch.undo()
        monkeypatch.setattr(links, "this_host_id", lambda: "there")
        target = successor.allocate("pool", 1, 64)
        assert isinstance(await writer.write([bytes(64)], target.remote, (0,)), Written)
    assert not await asks.fence(lost, "there", os.getpid())
    assert not await asks.fence(lost, "elsewhere", ended.pid)
    monkeypatch.setattr(leave, "is_still_sent_to", lambda ports: True)
    assert not await asks.fence(lost, "there", ended.pid)
    monkeypatch.setattr(leave, "is_still_sent_to", lambda ports: False)
    assert await asks.fence(lost, "there", ended.pid)
    held.release(end)
    for engine in (successor, writer, owner):
        await engine.close()


def test_another_pid_namespace_is_another_host() -> None:
    """Fault F60: pods of one node have one boot id, and the first process of each is pid 1."""
    tell = "from epd.transport.host import this_host_id; print(this_host_id())"
    here = [sys.executable, "-c", tell]
    there = subprocess.run(
        ["unshare", "--pid", "--fork", *here], capture_output=True, text=True, check=False
    )
    if there.returncode:
        pytest.skip(f"no pid namespace can be made here: {there.stderr.strip()}")
    assert subprocess.check_output(here, text=True).strip() == this_host_id()
    assert there.stdout.strip() != this_host_id()


def test_where_pids_count_from_one_again_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where nobody may make one: the kernel names the own one by another number."""
    own, stat = this_host_id(), os.stat

    def elsewhere(path: Any, **more: Any) -> Any:
        told = stat(path, **more)
        is_namespace = path == "/proc/self/ns/pid"
        return SimpleNamespace(st_ino=told.st_ino + 1) if is_namespace else told

    monkeypatch.setattr(os, "stat", elsewhere)
    assert this_host_id.__wrapped__() not in {own, this_boot_id()}


def at_listeners(one: TcpSocket) -> bool:
    return one.is_at_listener


async def test_a_connection_that_its_caller_closed_is_seen_until_it_is_read() -> None:
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    while not accepted:
        await asyncio.sleep(0.001)
    assert not has_half_closed_arrivals(at_listeners)
    transport = accepted[0].transport
    transport.pause_reading()  # as a thread that does not get round to it
    writer.write(b"late bytes")
    writer.close()
    await writer.wait_closed()
    assert has_half_closed_arrivals(at_listeners)
    transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        while has_half_closed_arrivals(at_listeners):
            await asyncio.sleep(0.001)
    server.close()
    await server.wait_closed()


def test_what_a_dead_process_has_queued_is_seen_before_its_end_arrives() -> None:
    """Its connection is open at this end as long as this end's buffer is full."""
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
    code += "s.setblocking(False)\ntry:\n while True: s.send(bytes(1 << 16))\n"
    code += "except BlockingIOError: pass"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", code, port]) as sender:
            arrived, _ = server.accept()
        assert is_process_dead(sender.pid)
        with arrived:
            state = arrived.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            assert state == 1  # established
            assert has_half_closed_arrivals(at_listeners)
            while arrived.recv(1 << 20):
                assert has_half_closed_arrivals(at_listeners)
    assert not has_half_closed_arrivals(at_listeners)


def test_what_is_no_pid_is_not_known_to_be_dead() -> None:
    """Peers say theirs."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert is_process_dead(ended.pid)
    assert not is_process_dead(os.getpid())
    assert not any(map(is_process_dead, (0, -1, 1 << 40, -(1 << 40))))


async def test_nobody_else_may_look_into_the_directory_of_files(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        directory = tmp_path / "rows"
        engine = FileTransferEngine(BackendSettings("owner", 1, directory=str(directory)))
        assert directory.stat().st_mode & 0o777 == 0o700
        await engine.close()
    finally:
        os.umask(mask)


@contextlib.contextmanager
def closed_by_its_peer() -> Iterator[socket.socket]:
    """A connection that this process opened, and keeps."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as ours,
    ):
        server.accept()[0].close()
        assert ours.recv(1) == b""
        yield ours


async def test_a_connection_that_its_peer_closed_holds_up_no_fence_but_its_movers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake keeps its own to a peer that died for ever, as a pool of HTTP connections may."""
    owner, writer, held, _, _ = await begin(make, monkeypatch)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with closed_by_its_peer() as other, socket.socket() as never_connected:
        never_connected.bind(("127.0.0.1", 0))
        if owner.kind == "nixl":
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LIMIT_MS)
            assert not await owner.fence(WRITER, this_host_id(), ended.pid)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
        async with asyncio.timeout(PATIENCE_S):
            while not await owner.fence(WRITER, this_host_id(), ended.pid):
                await asyncio.sleep(0.01)
    held.release(End.DONE)
    await writer.close()
    await owner.close()
