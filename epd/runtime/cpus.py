"""Which CPUs a process runs on.

An instance that shares its cores is slowed by what others do on them, however well the stages are
separated.  A list of CPUs is written as `taskset` writes it: `0-3,8`.  Siblings of one core are
dealt out together, so that two instances meet in one core only where there are too few.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """ "0-3,8" gives (0, 1, 2, 3, 8).  Raises ValueError."""
    cpus: list[int] = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is no list of CPUs; write them as taskset does: 0-3,8")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last <= 1 << 16:
            raise ValueError(f"{text!r} is no list of CPUs; a range grows, such as 0-3")
        cpus += range(first, last + 1)
    return tuple(dict.fromkeys(cpus))


def format_cpus(cpus: tuple[int, ...]) -> str:
    """The inverse of `parse_cpus`, without ranges."""
    return ",".join(map(str, cpus))


def usable_cpus() -> tuple[int, ...]:
    """Those of this process, siblings of one core side by side."""
    return tuple(sorted(os.sched_getaffinity(0), key=lambda cpu: (_siblings(cpu), cpu)))


def _siblings(cpu: int) -> int:
    """The first CPU of the same core; the CPU itself where Linux has no list."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return parse_cpus(path.read_text().strip())[0]
    except (OSError, ValueError):
        return cpu


def pin(text: str) -> None:
    """Bind this process, and the threads that it will start, to a list of CPUs; not if empty."""
    if text:
        os.sched_setaffinity(0, parse_cpus(text))
