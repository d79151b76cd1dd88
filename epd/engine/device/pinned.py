"""Arenas reserved at start, of pinned host memory or a device's, and memory that is registered.

Pinning costs milliseconds per ten megabytes and stops the thread that asks.  So regular downloads
are cut from memory that was pinned before the first request, and rows that stay on the device from
memory that its plan has reserved.  A piece returns when nothing refers to it any more: tensors,
arrays and views over it keep it, whoever holds them.  On a device that is as good as an event: a
launched call keeps what it uses until its end.

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
from typing import Any

import torch

logger = logging.getLogger(__name__)
ALIGNED_NBYTES = 4096


class Registered:
    """What memory is registered for, and as long as."""


def register(buffer: memoryview, owner: Registered) -> torch.Tensor:
    """uint8 tensor over another owner's memory, registered with the current device as long as
    `owner` lives.  Memory unmapped while registered would leave its pages with the driver, and new
    contents of these addresses would go up as zeros.

    Where the driver refuses, which is logged, copies are slower and hold up the launch thread.
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
        weakref.finalize(owner, _unregister, tensor).atexit = False
    return tensor


def _unregister(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class _Piece:
    """A piece of a device's memory, as torch takes it: what it makes of this keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Arena:
    """First fit over one allocation; from any thread."""

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        """`device`: a CUDA device; None: the host, pinned where there is one."""
        pinned = device is None and torch.cuda.is_available()
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.nbytes = nbytes
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
        address, device = self._memory.data_ptr() + at, self._memory.device
        piece: Any
        if device.type == "cuda":
            piece = _Piece(address, nbytes)
            tensor = torch.as_tensor(piece, device=device).view(dtype)
        else:
            piece = (ctypes.c_ubyte * nbytes).from_address(address)
            tensor = torch.frombuffer(piece, dtype=dtype)
        weakref.finalize(piece, self._note, at, length).atexit = False
        return tensor.view(shape)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for it on its way down; where the arena is full it is pinned here, which takes
        long."""
        host = self.take(tensor.shape, tensor.dtype)
        if host is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host

    def _note(self, at: int, length: int) -> None:
        """A piece has come back; its finalizer holds this method, and so all of the memory."""
        self._returned.append((at, length))

    def holds(self, tensor: torch.Tensor) -> bool:
        offset = tensor.data_ptr() - self._memory.data_ptr()
        return tensor.device == self._memory.device and 0 <= offset < self.nbytes

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
