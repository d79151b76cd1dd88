"""What a user starts by hand, over its lives: an instance that was expelled joins again.

A cut makes the gateway declare an instance lost, and peers fence that epoch: they trust the kernel
that its process is gone.  So a new life is a new process, and the one that the user started is its
parent, which passes signals on and waits.  The child holds a pipe of it, and ends when it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

PAUSE_S = 0.5


PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def live_again(live: Callable[[], int], again: int) -> int:
    """Run `live` in a process of its own, anew while its exit status is `again`; the last status.

    Who was asked to end does not live again.  To be called before there are threads.
    """
    while True:
        status, asked = _live(live)
        if status != again or asked:
            return status
        time.sleep(PAUSE_S)


def _live(live: Callable[[], int]) -> tuple[int, bool]:
    """One life: its exit status, and whether a signal asked for its end.

    Signals are waited for, not handled: one between the fork and a handler would end the parent
    alone, and one between a handler and `waitpid` would be seen only when the child has ended.
    """
    lifeline, ours = os.pipe()
    awaited = (*PASSED_ON, signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    pid = os.fork()
    if not pid:
        os.dup2(lifeline, 0)
        os.close(lifeline)
        os.close(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _be(live)
    os.close(lifeline)
    asked = False
    try:
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            got = signal.sigtimedwait(awaited, PAUSE_S)
            if got and got.si_signo in PASSED_ON:
                asked = True
                os.kill(pid, got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(ours)
    status = os.waitstatus_to_exitcode(ended[1])
    return status if status >= 0 else 128 - status, asked


def _be(live: Callable[[], int]) -> None:
    """The child; it leaves as `os._exit` does: what its parent has to tear down is not its own."""
    status = 1
    try:
        status = live()
    finally:
        sys.stderr.flush()
        os._exit(status)
