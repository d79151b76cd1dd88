"""Questions and answers between the processes of one measurement, many at once.

One packet each over a socket pair that the loop watches itself: a stream reader between would cost
as much as the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

MAX_NBYTES = 1 << 16


class Words:
    """One end; `hear` is called on the loop with each packet, and with None at the end."""

    def __init__(self, end: socket.socket, hear: Callable[[Any], None]) -> None:
        self._end = end
        self._hear = hear
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end, self._readable)

    def say(self, word: Any) -> None:
        self._end.send(msgspec.json.encode(word))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        self._end.close()

    def _readable(self) -> None:
        try:
            packet = self._end.recv(MAX_NBYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self._end)
        self._hear(msgspec.json.decode(packet) if packet else None)


class Gone(Exception):
    """The other process has ended; what was asked of it may have been done or not."""


class Remote:
    """A process that answers, as the one that asks sees it."""

    def __init__(self, module: str, enter: Sequence[str] = ()) -> None:
        """Start `python -m module FD`.  It ends when this end closes.

        `enter`: what the command begins with that is to run on another host of this kernel; it
        forks."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            fd = its.fileno()
            command = [*enter, sys.executable, "-m", module, str(fd)]
            # Of a group whose parent has left, in which one is stopped, the kernel hangs up all.
            self.process = subprocess.Popen(command, pass_fds=(fd,), process_group=0)
        self._has_entered = bool(enter)
        self._words = Words(mine, self._answered)
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self.gone = False
        self.cpu_s = 0.0

    def signal(self, number: int) -> None:
        """To both where it has entered: `nsenter` stops itself when its child stops."""
        pid = self.process.pid
        with contextlib.suppress(OSError):  # it has ended
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
            for one in (*map(int, children.split() if self._has_entered else ()), pid):
                os.kill(one, number)

    async def kill(self) -> None:
        """Returns when it has ended."""
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        await self.close()

    async def ask(self, do: str, **arguments: Any) -> Any:
        """What the other's method `do` returns.  Raises Gone, or RuntimeError with its error."""
        if self.gone:
            raise Gone
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._words.say((number, do, arguments))
        except OSError:
            self._end()
        return await answer

    async def close(self) -> None:
        """Let it end in good order and wait for that."""
        self._words.close()
        self._end()  # its end may not have been heard
        self.signal(signal.SIGCONT)
        await asyncio.to_thread(self.process.wait, 30)

    def _answered(self, word: Any) -> None:
        if word is None:
            self._end()
            return
        number, self.cpu_s, result, error = word
        answer = self._open.pop(number)
        if error:
            answer.set_exception(RuntimeError(error))
        else:
            answer.set_result(result)

    def _end(self) -> None:
        self.gone = True
        for answer in self._open.values():
            answer.set_exception(Gone())
        self._open.clear()


async def answer_all(fd: int, target: Any) -> None:
    """Answer with what `target`'s methods return, coroutines or not, until the asker is gone."""
    ended = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def reply(number: int, result: Any, error: str) -> None:
        if not ended.is_set():
            words.say((number, time.process_time(), result, error))

    async def later(number: int, pending: Any) -> None:
        try:
            reply(number, await pending, "")
        except Exception as error:
            reply(number, None, repr(error))

    def hear(word: Any) -> None:
        if word is None:
            ended.set()
            return
        number, do, arguments = word
        try:
            result = getattr(target, do)(**arguments)
        except Exception as error:
            reply(number, None, repr(error))
            return
        if asyncio.iscoroutine(result):
            task = asyncio.ensure_future(later(number, result))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            reply(number, result, "")

    words = Words(socket.socket(fileno=fd), hear)
    await ended.wait()
