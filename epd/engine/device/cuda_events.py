"""CUDA events as completions: the launch thread never waits for the GPU.

After a call has queued its kernels, an event is recorded behind them.  A wait thread blocks in
`event.synchronize()`, which gives up the GIL, and then calls back.  It waits for events in the
order of their recording, which on the launch thread's one stream is the order in which they pass:
one thread delays nothing.  Another stream is a lane with its own wait thread.

A result handed over after its event is safe to read and to send; an earlier write would send memory
that the kernels have not filled yet (fault F2).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from epd.engine.device.executor import Completion, Deliver


class CudaEvent(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self, *stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def blocking_event() -> CudaEvent:
    """An event of the current CUDA device whose `synchronize` sleeps instead of spinning."""
    import torch

    return torch.cuda.Event(blocking=True)


class CudaEventBridge(Completion):
    """`Completion` for one device; `watch` is called on its launch thread.

    `lanes`: streams by name, besides the one that is current there.  `works`: whether the device
    still takes work; does not block.
    """

    def __init__(
        self,
        make_event: Callable[[], CudaEvent] = blocking_event,
        lanes: Mapping[str, Any] | None = None,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make_event = make_event
        self._works = works
        self._streams = dict(lanes or {})
        self._lanes = {name: _Lane(name) for name in ("", *self._streams)}

    def watch(self, deliver: Deliver, lane: str = "") -> None:
        event = self._make_event()
        event.record(*((self._streams[lane],) if lane else ()))
        self._lanes[lane].watched.put((event, deliver))

    def works(self) -> bool:
        return self._works()

    def close(self, timeout_s: float) -> None:
        for lane in self._lanes.values():
            lane.watched.put(None)
        for lane in self._lanes.values():
            lane.thread.join(timeout_s)


class _Lane:
    """The events of one stream and the thread that waits for them."""

    def __init__(self, name: str) -> None:
        self.watched: queue.SimpleQueue[tuple[CudaEvent, Deliver] | None] = queue.SimpleQueue()
        name = f"cuda-events-{name}" if name else "cuda-events"
        self.thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        while (entry := self.watched.get()) is not None:
            event, deliver = entry
            error: BaseException | None = None
            try:
                event.synchronize()
            except BaseException as raised:
                error = raised
            deliver(error)
            del entry, event, deliver
