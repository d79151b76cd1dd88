"""Memory of this host that peers write into: reserved and touched before the first request."""

from __future__ import annotations

import mmap

MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
TOUCH_STEP_NBYTES = 16 << 20


def anonymous(nbytes: int) -> memoryview:
    """Private zeroed memory, page aligned, every page resident."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    touch(memory)
    return memory


def touch(memory: memoryview) -> None:
    """Make every page of a mapping resident.  In steps: madvise keeps the interpreter lock."""
    whole = memory.obj
    assert isinstance(whole, mmap.mmap)
    for start in range(0, len(whole), TOUCH_STEP_NBYTES):
        length = min(TOUCH_STEP_NBYTES, len(whole) - start)
        try:
            whole.madvise(MADV_POPULATE_WRITE, start, length)
        except OSError:  # an older kernel
            for offset in range(start, start + length, mmap.PAGESIZE):
                whole[offset] = 0
