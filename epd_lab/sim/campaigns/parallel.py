"""Many independent runs over the cores of this machine: results in order, progress, Ctrl-C.

`results` is `map` over processes.  Order is that of the items, so what is printed and counted does
not depend on the number of workers.  Who leaves early (an interrupt, enough failures) does not wait
for what is still running: the workers hold nothing, so they are ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import TypeVar

OPEN_PER_WORKER = 4

Item = TypeVar("Item")
Found = TypeVar("Found")


def results(
    function: Callable[[Item], Found], items: Iterable[Item], workers: int
) -> Generator[Found, None, None]:
    """`function` of every item, in order; in this process if `workers` is 1."""
    if workers <= 1:
        yield from map(function, items)
        return
    waiting = iter(items)
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, initializer=_leave_interrupts_to_the_parent)
    open_runs: list[Future[Found]] = []
    try:
        first = islice(waiting, OPEN_PER_WORKER * workers)
        open_runs.extend(pool.submit(function, item) for item in first)
        while open_runs:
            yield open_runs[0].result()
            del open_runs[0]
            open_runs.extend(pool.submit(function, item) for item in islice(waiting, 1))
    finally:
        if open_runs:
            for worker in multiprocessing.active_children():
                if worker not in before:
                    worker.terminate()
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here; outside, the command line ends without ado."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def progress_every_s() -> float:
    """Often on a terminal, which is watched; seldom in a log, which is read afterwards."""
    return 2.0 if sys.stderr.isatty() else 20.0


class Progress:
    """A line on stderr now and then: how many, how fast, how long still."""

    def __init__(self, label: str, total: int, unit: str = "seeds") -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._every_s = progress_every_s()
        self._shown_s = self._started_s = time.perf_counter()

    @property
    def took_s(self) -> float:
        """Wall-clock seconds since this began."""
        return time.perf_counter() - self._started_s

    def show(self, done: int, note: str) -> None:
        """`note`: the finds so far, such as `2 failed`."""
        now_s = time.perf_counter()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        rate = done / max(self.took_s, 1e-9)
        left_s = (self._total - done) / max(rate, 1e-9)
        told = f"{self._label}: {done}/{self._total} {self._unit}, {rate:.1f}/s, {note}"
        print(f"{told}, {left_s:.0f} s left", file=sys.stderr, flush=True)
