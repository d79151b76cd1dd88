"""The ends of what a device has been given, as futures of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable

from epd.transport.cuda.device import DeviceError

PR_SET_TIMERSLACK = 29  # linux/prctl.h
SLACK_NS = 1000

_Tell = Callable[[DeviceError | None], object]


class CudaEnds:
    """A thread that waits for what is queued, in that order, which is the device's own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], _Tell] | None]
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="epd-cuda-ends", daemon=True).start()

    def end_of(self, passed: Callable[[], None]) -> asyncio.Future[None]:
        """Fails with what `passed` raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle(error: DeviceError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._queue.put((passed, lambda error: loop.call_soon_threadsafe(settle, error)))
        return future

    def _wait(self) -> None:
        # A thread's sleeps are prolonged by 50 us else, more than a copy of 16 MB takes.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS)
        while (entry := self._queue.get()) is not None:
            passed, tell = entry
            error: DeviceError | None = None
            try:
                passed()
            except Exception as raised:  # whatever it is, those behind it are waited for
                error = DeviceError(str(raised))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                tell(error)
            del entry, passed, tell

    def close(self) -> None:
        self._queue.put(None)
