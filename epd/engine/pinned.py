"""Pinned host memory: an arena reserved at start, and memory of others that is registered.

Pinning costs milliseconds per ten megabytes and stops the thread that asks, which here is the
launch thread.  So what comes down from the device regularly is cut from memory that was pinned
before the first request.  A piece returns when nothing refers to it any more: tensors, arrays and
views over it keep it, whoever holds them.

A piece's finalizer runs wherever the garbage collector does, within `take` too.  So it takes no
lock: it notes what has come back, and the next `take` puts that in order (fault F50).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from collections import deque

import torch

logger = logging.getLogger(__name__)
ALIGNED_NBYTES = 4096


def register(buffer: memoryview, owner: object) -> torch.Tensor:
    """uint8 tensor over memory of somebody else, registered with the current device for as long as
    `owner` lives.

    Where the driver refuses, copies are slower and hold up the launch thread; the log says so.
    """
    tensor = torch.frombuffer(buffer.cast("B"), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(error):
        logger.warning(
            "the driver does not pin %d bytes (%s): copies to the device will be slow; "
            "raise the limit of locked memory (ulimit -l)",
            tensor.numel(), runtime.cudaGetErrorString(error),
        )  # fmt: skip
        with contextlib.suppress(RuntimeError):  # else the next launch would be blamed for it
            torch.zeros(1, device="cuda")
    else:
        weakref.finalize(owner, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


class PinnedArena:
    """First fit over one allocation; from any thread."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._lock = threading.Lock()
        self._free: dict[int, int] = {0: nbytes} if nbytes else {}  # offset to length
        self._returned: deque[tuple[int, int]] = deque()  # what finalizers have noted

    @property
    def free_nbytes(self) -> int:
        with self._lock:
            self._join()
            return sum(self._free.values())

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Uninitialised memory; None when no piece is long enough."""
        nbytes = shape.numel() * dtype.itemsize
        if not nbytes:
            return None
        length = -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
        with self._lock:
            self._join()
            at = next((at for at, free in self._free.items() if free >= length), None)
            if at is None:
                return None
            rest = self._free.pop(at) - length
            if rest:
                self._free[at + length] = rest
        piece = (ctypes.c_ubyte * nbytes).from_address(self._memory.data_ptr() + at)
        weakref.finalize(piece, self._returned.append, (at, length)).atexit = False
        return torch.frombuffer(piece, dtype=dtype).view(shape)

    def _join(self) -> None:
        """Free what has come back, neighbours as one; the lock is held."""
        if not self._returned:
            return
        while self._returned:
            at, length = self._returned.popleft()
            self._free[at] = length
        joined: dict[int, int] = {}
        for begin, free in sorted(self._free.items()):
            last = next(reversed(joined), None)
            if last is not None and last + joined[last] == begin:
                joined[last] += free
            else:
                joined[begin] = free
        self._free = joined
