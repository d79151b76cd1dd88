"""This host and its processes, as the transports need to know them."""

from __future__ import annotations

import functools
import os
import select
import socket


@functools.cache
def this_host_id() -> str:
    """Equal for all processes of one boot of one host (containers of a host share it)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def is_process_dead(pid: int) -> bool:
    """True once the process and all its threads have ended (a zombie has); False if unsure.

    A pid that was given to another process meanwhile counts as alive.
    """
    if pid <= 0:
        return False
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))  # readable when the last thread is gone
    finally:
        os.close(fd)
