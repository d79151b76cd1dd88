"""CUDA events as completions: the launch thread never waits for the GPU.

After a call has queued its kernels, an event is recorded behind them.  A wait thread blocks in
`event.synchronize()`, which gives up the GIL, and then calls back.  Events are waited for in the
order in which they were recorded; on the one stream of the launch thread that is also the order in
which they pass, so one wait thread delays nothing.

A result handed over by `call_soon_threadsafe` after its event is safe to read and to send: a write
that starts earlier would send memory that the kernels have not filled yet (fault F2).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from epd.engine.executor import Deliver


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def blocking_event() -> Event:
    """An event of the current CUDA device whose `synchronize` sleeps instead of spinning."""
    import torch

    return torch.cuda.Event(blocking=True)


class CudaEventBridge:
    """`Completion` for one device; `watch` is called on its launch thread."""

    def __init__(self, make_event: Callable[[], Event] = blocking_event) -> None:
        self._make_event = make_event
        self._watched: queue.SimpleQueue[tuple[Event, Deliver] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="cuda-events", daemon=True)
        self._thread.start()

    def watch(self, deliver: Deliver) -> None:
        event = self._make_event()
        event.record()
        self._watched.put((event, deliver))

    def close(self, timeout_s: float) -> None:
        self._watched.put(None)
        self._thread.join(timeout_s)

    def _wait(self) -> None:
        while (entry := self._watched.get()) is not None:
            event, deliver = entry
            error: BaseException | None = None
            try:
                event.synchronize()
            except BaseException as raised:
                error = raised
            deliver(error)
            del entry, event, deliver
