"""Work on what strangers sent, in a child that may die: the side of its owner (`fork_server`).

Each piece of work has a process of its own, with bounds of time, memory and stack, and two
outcomes: it is done, or its process died of something.  The fork server is started by the first
piece and again after it was lost; it ends with its owner, also by kill -9.  A `Lane` bounds how
many pieces run and wait.  Behind a lane of little time that many share, one of more time takes slow
pieces, which so never hold up the rest for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import socket
import sys
from dataclasses import dataclass

import msgspec

from epd.api.expendable.fork_server import CHUNK_NBYTES, FRAME, OUT_OF_MEMORY, STATUS, ChildBounds

START_S = 60.0  # a large vocabulary is read meanwhile
GRACE_S = 5.0  # beyond what a child has, for its server to notice
MAX_ANSWER_NBYTES = 64 << 20
ALONE = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # a fork has no threads


class Cause(enum.StrEnum):
    """What a child died of."""

    TIME = enum.auto()  # more of a processor than it may take
    MEMORY = enum.auto()
    CRASH = enum.auto()  # the stack's end, most often
    STALL = enum.auto()  # it got no processor or was killed: that says nothing of its work


CAUSES = {
    -signal.SIGPROF: Cause.TIME,
    -signal.SIGABRT: Cause.MEMORY,  # Rust's way to say so
    OUT_OF_MEMORY: Cause.MEMORY,
    -signal.SIGALRM: Cause.STALL,
    -signal.SIGKILL: Cause.STALL,
}


@dataclass(frozen=True, slots=True)
class WorkDone:
    """A child did its work; `said` is its last frame."""

    said: bytes


@dataclass(frozen=True, slots=True)
class Died:
    """A child died behind this frame, empty if it had sent none."""

    said: bytes
    cause: Cause


class LaneFull(Exception):
    """As many wait as may: nothing was done."""


class ServerLost(Exception):
    """The process that forks ended or hung, and the one after it: nothing was done."""


class ForkServer:
    """Runs work in children; `module` has `prepare(*arguments)`.  For one loop."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-m", "epd.api.expendable.fork_server", module, *arguments)
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._closed = False

    async def run(self, request: bytes, bounds: ChildBounds) -> WorkDone | Died:
        """Raises ServerLost."""
        try:
            return await self._run(request, bounds)
        except ServerLost:
            return await self._run(request, bounds)  # of a new one; two losses are no accident

    async def _run(self, request: bytes, bounds: ChildBounds) -> WorkDone | Died:
        control = await self._started()
        (talk, its_talk), (end, its_end) = socket.socketpair(), socket.socketpair()
        with talk, end:
            talk.setblocking(False)
            end.setblocking(False)
            try:
                with its_talk, its_end:
                    fds = [its_talk.fileno(), its_end.fileno()]
                    socket.send_fds(control, [msgspec.msgpack.encode(bounds)], fds)
                async with asyncio.timeout(bounds.wall_s + GRACE_S):
                    said = await _converse(talk, request)
                    status = await _read(end, STATUS.size)
            except (OSError, TimeoutError):
                status = b""
        if not status:
            await self._lost(control)
            raise ServerLost
        (exit_status,) = STATUS.unpack(status)
        return Died(said, CAUSES.get(exit_status, Cause.CRASH)) if exit_status else WorkDone(said)

    async def _started(self) -> socket.socket:
        async with self._lock:
            if self._closed:
                raise ServerLost
            if self._control is None:
                control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                control.setblocking(False)
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=theirs.fileno(),
                        stdout=asyncio.subprocess.DEVNULL,
                        env=os.environ | ALONE,
                        start_new_session=True,  # what a terminal sends is its owner's business
                    )
                self._control = control
                try:
                    async with asyncio.timeout(START_S):
                        is_ready = bool(await _read(control, 1))
                except TimeoutError:
                    is_ready = False
                if not is_ready:
                    await self._end()
                    raise ServerLost
            return self._control

    async def _lost(self, control: socket.socket) -> None:
        async with self._lock:
            if control is self._control:  # else another piece of work has noticed before
                await self._end()

    async def close(self) -> None:
        """End it and its children."""
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Lane:
    """Work of equal bounds: so many run side by side, and so many wait, first come first served."""

    def __init__(
        self, server: ForkServer, bounds: ChildBounds, places: int, max_waiting: int
    ) -> None:
        self.bounds = bounds
        self._server = server
        self._places = asyncio.Semaphore(places)
        self._most = places + max_waiting
        self._count = 0

    async def run(self, request: bytes) -> WorkDone | Died:
        """Raises LaneFull, ServerLost."""
        if self._count >= self._most:
            raise LaneFull
        self._count += 1
        try:
            async with self._places:
                return await self._server.run(request, self.bounds)
        finally:
            self._count -= 1


async def _converse(talk: socket.socket, request: bytes) -> bytes:
    """The last frame of the answer; what was cut short does not count."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # it died before it had read all
        await loop.sock_sendall(talk, request)
        talk.shutdown(socket.SHUT_WR)
    answer, said = await _read(talk, MAX_ANSWER_NBYTES), b""
    while len(answer) >= FRAME.size:
        (nbytes,) = FRAME.unpack_from(answer)
        frame, answer = answer[FRAME.size :][:nbytes], answer[FRAME.size + nbytes :]
        if len(frame) == nbytes:
            said = frame
    return said


async def _read(source: socket.socket, most_nbytes: int) -> bytes:
    """Up to the end of file, or so many bytes."""
    loop, found = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionResetError):  # it died with our words unread
        while len(found) < most_nbytes:
            piece = await loop.sock_recv(source, CHUNK_NBYTES)
            if not piece:
                break
            found += piece
    return bytes(found)
