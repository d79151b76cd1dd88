"""Memory as file descriptors, handed from process to process over unix sockets.

Each owner listens in a directory that only its user may enter.  A writer sends its name and the
region that it means, and gets the descriptor, or a reason.  The connection stays open for as long
as the region is served: the owner closes it with the region, and the kernel with the owner.  So a
writer sees before and after each write whether it still is, and learns at once when it is not.

The owner keeps a pidfd of every process that has mapped its memory.  It becomes readable when the
process has ended with all that it has queued on devices.  Its files do not wait for these: a killed
writer's bytes land for some milliseconds after its file lock is free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Callable

import msgspec

from epd.messages import RemoteRegion
from epd.transport.base import Life
from epd.transport.endpoint import check_reach, is_answered, prepare_ipc
from epd.transport.host import has_ended as is_over
from epd.transport.region import RegionKey, WriteRefused, key_of

ANSWER_TIMEOUT_S = 5.0
MAX_NBYTES = 64 << 10  # of a question or an answer
KIND = socket.SOCK_SEQPACKET


class MemoryQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Of a writer."""

    instance_id: str
    epoch: int
    region: RemoteRegion


def own_directory() -> str:
    """For sockets of this user.  Raises TransportError."""
    path = os.path.join(tempfile.gettempdir(), f"epd-memory-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return path


def sweep(directory: str) -> None:
    """Remove sockets of the dead; one is named `.sock` when it is listened at."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.endswith(".sock") and not is_answered(path, KIND):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class MemorySocket:
    """The owner's end.  `export(question)`: the descriptor; raises WriteRefused."""

    def __init__(self, directory: str, export: Callable[[MemoryQuestion], int]) -> None:
        self.name = f"{secrets.token_hex(8)}.sock"
        self._path = os.path.join(directory, self.name)
        self._export = export
        self._doors: dict[socket.socket, RegionKey | None] = {}  # who has asked for which region
        self._writers: dict[Life, int] = {}  # pidfds
        self._barred: set[Life] = set()
        check_reach(f"ipc://{self._path}", encrypted=False)
        prepare_ipc(self._path)
        sweep(directory)
        self._listener = socket.socket(socket.AF_UNIX, KIND | socket.SOCK_NONBLOCK)
        self._listener.bind(f"{self._path}.new")
        self._listener.listen(128)
        os.rename(f"{self._path}.new", self._path)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            door, _ = self._listener.accept()
            door.setblocking(False)
            self._doors[door] = None
            asyncio.get_running_loop().add_reader(door, self._read, door)

    def _read(self, door: socket.socket) -> None:
        try:
            data = door.recv(MAX_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._doors[door] is not None:  # gone, or it asks twice
            self._shut(door)
            return
        try:
            question = msgspec.msgpack.decode(data, type=MemoryQuestion)
            self._hand_out(door, question)
        except (WriteRefused, msgspec.MsgspecError, OSError) as error:
            with contextlib.suppress(OSError):
                door.send(str(error).encode()[:MAX_NBYTES])
            self._shut(door)

    def _hand_out(self, door: socket.socket, question: MemoryQuestion) -> None:
        life = (question.instance_id, question.epoch)
        if life in self._barred:
            raise WriteRefused("its owner has fenced this instance")
        fd = self._export(question)
        try:
            if life not in self._writers:
                self._writers[life] = os.pidfd_open(_pid_of(door))
            socket.send_fds(door, [b"mapped"], [fd])
        finally:
            os.close(fd)
        self._doors[door] = key_of(question.region)

    def bar(self, life: Life, *, has_ended: bool = False) -> bool:
        """Hand out nothing to it from now on; whether it can write nothing any more."""
        self._barred.add(life)
        pidfd = self._writers.get(life)
        if pidfd is not None and (has_ended or is_over(pidfd)):
            os.close(self._writers.pop(life))
        return life not in self._writers

    def withdraw(self, region: RemoteRegion) -> None:
        """Close the doors of those that have mapped it."""
        for door, key in list(self._doors.items()):
            if key == key_of(region):
                self._shut(door)

    def _shut(self, door: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(door)
        del self._doors[door]
        door.close()

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for door in list(self._doors):
            self._shut(door)
        for pidfd in self._writers.values():
            os.close(pidfd)
        self._writers.clear()


def _pid_of(door: socket.socket) -> int:
    found = door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", found)[0]
    return pid


class Door:
    """A writer's end: open for as long as the region is served.  `on_shut` is called once."""

    def __init__(self, wire: socket.socket, on_shut: Callable[[], None]) -> None:
        self._wire = wire
        self._on_shut = on_shut
        asyncio.get_running_loop().add_reader(wire, self._look)

    def is_open(self) -> bool:
        if self._wire.fileno() < 0:
            return False
        try:
            return bool(self._wire.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _look(self) -> None:
        if not self.is_open():
            self.close()
            self._on_shut()

    def close(self) -> None:
        if self._wire.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._wire)
            self._wire.close()


async def ask(path: str, question: MemoryQuestion) -> tuple[socket.socket, int]:
    """The connection, and the descriptor.  Raises WriteRefused."""
    wire = socket.socket(socket.AF_UNIX, KIND | socket.SOCK_NONBLOCK)
    try:
        wire.connect(path)
        wire.send(msgspec.msgpack.encode(question))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await _is_readable(wire)
        answer, fds, _, _ = socket.recv_fds(wire, MAX_NBYTES, 1)
        if not fds:
            raise WriteRefused(answer.decode(errors="replace") or "its owner is gone")
    except (OSError, TimeoutError) as error:
        wire.close()
        owner = f"{question.region.instance_id}:{question.region.epoch}"
        raise WriteRefused(f"{owner} does not hand its memory out: {error!r}") from None
    except BaseException:
        wire.close()
        raise
    return wire, fds[0]


async def _is_readable(wire: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not arrived.done():
            arrived.set_result(None)

    loop.add_reader(wire, tell)
    try:
        await arrived
    finally:
        loop.remove_reader(wire)
