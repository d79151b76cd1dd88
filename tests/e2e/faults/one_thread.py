"""One thread of another process stands still, as a debugger has it; all others run on.

Nothing of the process takes part in it.  `ptrace` stops a thread of whoever lets it; the kernel
wants all its calls of one thread of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WALL = 0x40000000  # waits for threads, too
TICKS = os.sysconf("SC_CLK_TCK")


def _ptrace(request: int, thread: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, thread, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _busy_s(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = int(fields[11]) / TICKS
    return found


def busiest(pid: int, work: Callable[[], object]) -> int:
    """The thread that computes most while `work` is done, but for the one of the event loop."""
    before = _busy_s(pid)
    work()
    spent = {tid: busy_s - before.get(tid, 0.0) for tid, busy_s in _busy_s(pid).items()}
    del spent[pid]
    return max(spent, key=lambda tid: spent[tid])


@contextlib.contextmanager
def stopped(thread: int) -> Iterator[Callable[[], None]]:
    """Until the given function is called, or the end.  A thread that has died is reaped, as its
    process waits for that.  Raises OSError where the kernel does not let us."""
    _ptrace(PTRACE_SEIZE, thread)
    _ptrace(PTRACE_INTERRUPT, thread)
    os.waitpid(thread, WALL)

    def go_on() -> None:
        with contextlib.suppress(OSError):
            _ptrace(PTRACE_DETACH, thread)

    try:
        yield go_on
    finally:
        go_on()


def reap(thread: int) -> bool:
    """Whether it has died meanwhile."""
    with contextlib.suppress(ChildProcessError):
        found, status = os.waitpid(thread, WALL | os.WNOHANG)
        return found == thread and (os.WIFSIGNALED(status) or os.WIFEXITED(status))
    return True
