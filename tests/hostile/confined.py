"""A server whose processes share one bound of memory, by a cgroup of version 1 or 2."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Joins the group before anything is imported; what it starts is in the group, too.
_JOIN = """
import os, runpy, sys
open({procs!r}, "w").write(str(os.getpid()))
sys.argv[0] = "epd"
runpy.run_module("epd", run_name="__main__", alter_sys=True)
"""


class Group:
    """`program` starts `epd` inside; `peak_nbytes` is what all its processes had at most."""

    def __init__(self, path: Path, limit: str, peak: str, oom: str) -> None:
        self._path = path
        self._limit, self._peak, self._oom = limit, peak, oom
        self.program = ("-c", _JOIN.format(procs=str(path / "cgroup.procs")))

    def bound(self, nbytes: int) -> None:
        (self._path / self._limit).write_text(str(nbytes))

    @property
    def peak_nbytes(self) -> int:
        return int((self._path / self._peak).read_text())

    @property
    def num_killed(self) -> int:
        """Processes that the kernel killed for memory."""
        words = (self._path / self._oom).read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextlib.contextmanager
def confined(nbytes: int) -> Iterator[Group]:
    """A group of its own; its processes must have ended before it is left."""
    is_v2 = (ROOT / "cgroup.controllers").is_file()
    path = (ROOT if is_v2 else ROOT / "memory") / f"epd-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    if is_v2:
        group = Group(path, "memory.max", "memory.peak", "memory.events")
    else:
        files = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
        group = Group(path, *files)
    try:
        group.bound(nbytes)
        yield group
    finally:
        for _ in range(100):  # the kernel counts an ended process a little longer
            with contextlib.suppress(OSError):
                path.rmdir()
            if not path.exists():
                break
            time.sleep(0.1)
