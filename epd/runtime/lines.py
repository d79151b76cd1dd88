"""Lines for people, on stderr: who writes one neither waits for its reader nor fails with it.

Theory of operation
-------------------
Nobody promises that stderr takes anything: it may be closed, on a full disk, or a pipe whose reader
has died or does not read.  A loop that printed there would stand still with it (fault F69).  So a
line goes into a queue, which is bounded, and a thread of the process writes it.  A thread, and not
O_NONBLOCK: that is a property of the open file, which other processes have, too.  What cannot be
written is dropped and counted, and the next line that can be is preceded by how many were lost.

The thread begins with the first line, and a fork begins without one: who forks has threads only if
it has written something before.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_QUEUED_NBYTES = 1 << 20
FLUSH_S = 1.0  # at the end of a process
STDERR = 2


def _note(num_lost: int) -> str:
    return f"({num_lost} lines could not be written here)"


class Lines:
    """A queue of lines and the thread that writes them to a descriptor."""

    def __init__(self, fd: int) -> None:
        self.num_lost = 0  # since the last line that was written
        self.note: Callable[[int], str] = _note
        self._fd = fd
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._nbytes = 0  # in the queue, or being written
        self._thread: threading.Thread | None = None

    def say(self, line: str | bytes) -> None:
        """Without its end.  Neither blocks nor raises."""
        data = line if isinstance(line, bytes) else line.encode(errors="backslashreplace")
        with self._changed:
            if self._nbytes + len(data) > MAX_QUEUED_NBYTES:
                self.num_lost += 1
                return
            self._nbytes += len(data) + 1
            self._queue.append(data + b"\n")
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="lines", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all is written or lost; False: it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._nbytes, timeout_s)

    def forget(self) -> None:
        """In a fork: its parent writes what is in the queue."""
        self._begin()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                line = self._queue.popleft()
                num_lost = self.num_lost
            whole = f"{self.note(num_lost)}\n".encode() + line if num_lost else line
            is_written = self._write(whole)
            with self._changed:
                self.num_lost = self.num_lost - num_lost if is_written else self.num_lost + 1
                self._nbytes -= len(line)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has set O_NONBLOCK
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
                time.sleep(0.001)  # room for one byte is not room for a line
            except OSError:
                return False
        return True


_lines = Lines(STDERR)
say = _lines.say
flush = _lines.flush
os.register_at_fork(after_in_child=_lines.forget)
atexit.register(flush)


def tell_losses(note: Callable[[int], str]) -> None:
    """In a log's own form."""
    _lines.note = note


def hold_standard_files() -> None:
    """What is closed of 0, 1 and 2 becomes /dev/null: else the next file or socket would get its
    number, and what is printed there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
