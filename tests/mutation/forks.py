"""Work in forked processes, some at a time, each of which tells what it does, and may be ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

PR_SET_PDEATHSIG = 1
MEMORY_NBYTES = 6 << 30  # more than any test maps
START_LIMIT_S = 300.0  # to import everything, on a machine that does other work besides

Task = TypeVar("Task")
Tell = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Fork(Generic[Task]):
    """One forked process.  `told`: what it said, in order; `cut`: it was killed, or died."""

    task: Task
    pid: int
    pipe: int
    until_s: float
    told: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False
    _rest: bytes = b""

    def read(self) -> bool:
        """Take in what it says; False: it has ended.  `limit_s` is what it may take from now on."""
        chunk = os.read(self.pipe, 1 << 20)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "limit_s" in said:
                self.until_s = time.monotonic() + said["limit_s"]
            self.told.append(said)
        return bool(chunk)

    def reap(self) -> None:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        self.cut = self.cut or os.WIFSIGNALED(status)


def forked(
    tasks: Iterable[Task], jobs: int, work: Callable[[Task, Tell], None]
) -> Iterator[Fork[Task]]:
    """Do each task in a process of its own; yields them as they end."""
    waiting, running = iter(tasks), selectors.DefaultSelector()
    try:
        while True:
            while len(running.get_map()) < jobs and (task := next(waiting, None)) is not None:
                fork = _start(task, work)
                running.register(fork.pipe, selectors.EVENT_READ, fork)
            if not running.get_map():
                return
            ready = [key.data for key, _ in running.select(1.0)]
            for fork in [key.data for key in running.get_map().values()]:
                if fork in ready and not fork.read():
                    running.unregister(fork.pipe)
                    fork.reap()
                    yield fork
                elif time.monotonic() > fork.until_s and not fork.cut:
                    fork.cut = True
                    os.killpg(fork.pid, signal.SIGKILL)
    finally:
        for key in list(running.get_map().values()):
            os.killpg(key.data.pid, signal.SIGKILL)
            key.data.reap()
        running.close()


def _start(task: Task, work: Callable[[Task, Tell], None]) -> Fork[Task]:
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:  # nothing may leave this block but the process
            os.close(ours)
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not left behind
            _bound_memory()
            work(task, lambda said: _write(its, said))
        except BaseException as error:
            _write(its, {"error": "".join(traceback.format_exception(error))})
        finally:
            os._exit(0)
    os.close(its)
    with contextlib.suppress(OSError):  # both do it, and it may have ended
        os.setpgid(pid, pid)
    return Fork(task, pid, ours, time.monotonic() + START_LIMIT_S)


def _write(pipe: int, said: dict[str, Any]) -> None:
    rest = json.dumps(said).encode() + b"\n"
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _bound_memory() -> None:
    """What never ends must not take all memory before its time is over."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now_nbytes = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now_nbytes + MEMORY_NBYTES, most))
