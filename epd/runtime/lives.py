"""What a user starts by hand, over its lives: an instance that was expelled joins again.

A cut makes the gateway declare an instance lost, and peers fence that epoch: they trust the kernel
that its process is gone.  So a new life is a new process, and the one that the user started is its
parent, which passes signals on and waits.  The child holds a pipe of it, and ends when it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

PAUSE_S = 0.5


def live_again(live: Callable[[], int], again: int) -> int:
    """Run `live` in a process of its own, anew while its exit status is `again`; the last status.

    To be called before there are threads.
    """
    while (status := _live(live)) == again:
        time.sleep(PAUSE_S)
    return status


def _live(live: Callable[[], int]) -> int:
    lifeline, ours = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(lifeline, 0)
        os.close(lifeline)
        os.close(ours)
        _be(live)
    os.close(lifeline)

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ours)
    return status if status >= 0 else 128 - status


def _be(live: Callable[[], int]) -> None:
    """The child; it leaves as `os._exit` does: what its parent has to tear down is not its own."""
    status = 1
    try:
        status = live()
    finally:
        sys.stderr.flush()
        os._exit(status)
