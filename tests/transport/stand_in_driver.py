"""NVIDIA's driver as `cuda_driver.py` asks it, over the host's memory.

Memory is a memfd, handed on and mapped as a driver's is: it cannot be touched before it is mapped
and may be accessed, and what was unmapped reads as zeros.  A copy is made when somebody asks for an
event behind it for the second time, and not before, so that what does not wait is noticed.  Most
calls want the calling thread to have entered the context.  What they do on a GPU is tested there
(`tests/gpu/test_cuda_transport.py`).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import defaultdict
from enum import IntEnum
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from epd.transport.cuda.driver import NOT_READY, Driver

NAME = "epd-fake-device"
GRANULARITY = 4096  # bytes
CONTEXT = 77
MAP_FIXED, PROT_NONE = 0x10, 0  # linux/mman.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = NOT_READY
    CUDA_ERROR_LAUNCH_FAILED = 719


class _Copy:
    def __init__(self, target: int, source: int, nbytes: int) -> None:
        self._do: tuple[int, int, int] | None = (target, source, nbytes)

    def make(self) -> None:
        if self._do is not None:
            ctypes.memmove(*self._do)
        self._do = None


def _map(address: int | None, nbytes: int, protection: int, fd: int = -1) -> int:
    flags = (mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | (
        MAP_FIXED if address else 0
    )
    found: int = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    return found


class _Side:
    """How it is called: bindings give what they are asked for behind the result."""

    def __init__(self, its: StandIn, *, is_quick: bool) -> None:
        self._its = its
        self._is_quick = is_quick

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(self._its.types, name)
        if not hasattr(type(self._its), f"_{name}"):
            raise AttributeError(name)

        def call(*its: Any) -> Any:
            found = self._its.tell(name, its)
            if self._is_quick:
                return found
            self._its.told_by_bindings.add(name)
            is_result = found is None or isinstance(found, Result)
            return (found or Result.CUDA_SUCCESS,) if is_result else (Result.CUDA_SUCCESS, found)

        return call


class StandIn:
    """What both sides of its `driver` tell.

    `failing` names a call that fails, and `broken` lets all fail; `num_copies` and `shares` are of
    each call that queues several, in number and in bytes; `queueing` are threads that did.
    """

    def __init__(self) -> None:
        self.failing = ""
        self.broken = False
        self.num_devices = 1
        self.peers = {0}  # that the first reaches
        self.lacking: set[int] = set()  # that cannot export
        self.num_copies: list[int] = []
        self.shares: list[int] = []
        self.num_events = 0
        self.num_refusals = 1  # before an event has passed
        self.queueing: set[str] = set()  # threads
        self.told_by_bindings: set[str] = set()  # which let the interpreter's lock go
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._queued: dict[int, list[_Copy]] = defaultdict(list)  # by stream
        self._behind: dict[int, list[_Copy]] = {}  # by event
        self._asked: dict[int, int] = {}  # how often, by event
        self._inside = threading.local()
        self.types = MagicMock(CUresult=Result)

    @property
    def driver(self) -> Driver:
        return Driver(_Side(self, is_quick=False), _Side(self, is_quick=True))

    def tell(self, name: str, its: tuple[Any, ...]) -> Any:
        if (error := self._error(name)) is not None:
            return error
        with self._lock:
            return getattr(self, f"_{name}")(*its)

    def _error(self, name: str) -> Result | None:
        if self.broken or name == self.failing:
            return Result.CUDA_ERROR_LAUNCH_FAILED
        if name in NEED_NO_CONTEXT or getattr(self._inside, "context", None) == CONTEXT:
            return None
        return Result.CUDA_ERROR_INVALID_CONTEXT

    # --- set-up -----------------------------------------------------------------------------------

    def _cuInit(self, flags: int) -> Result | None:
        return Result.CUDA_ERROR_INVALID_VALUE if flags else None

    def _cuDeviceGetCount(self) -> int:
        return self.num_devices

    def _cuDeviceGet(self, index: int) -> int:
        return index

    def _cuDeviceGetAttribute(self, _attribute: object, device: int) -> int:
        return int(device not in self.lacking)

    def _cuDeviceGetUuid(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(bytes=bytes([device] * 16))

    def _cuDeviceCanAccessPeer(self, _device: int, other: int) -> int:
        return int(other in self.peers)

    def _cuDevicePrimaryCtxRetain(self, _device: int) -> int:
        return CONTEXT

    def _cuCtxSynchronize(self) -> Result | None:
        return None

    def _cuStreamCreate(self, _flags: int) -> int:
        return next(self._numbers)

    def _cuEventCreate(self, _flags: int) -> int:
        self.num_events += 1
        return next(self._numbers)

    # --- memory -----------------------------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, _properties: object, _kind: object) -> int:
        return GRANULARITY

    def _cuMemCreate(self, nbytes: int, _properties: object, _flags: int) -> int:
        handle = os.memfd_create(NAME)
        with os.fdopen(os.dup(handle), "r+b") as file:
            file.write(b"\xff" * nbytes)
        return handle

    def _cuMemExportToShareableHandle(self, handle: int, _kind: object, _flags: int) -> int:
        return os.dup(handle)

    def _cuMemImportFromShareableHandle(self, fd: int, _kind: object) -> int:
        return os.dup(fd)

    def _cuMemRelease(self, handle: int) -> Result | None:
        os.close(handle)
        return None

    def _cuMemAddressReserve(self, nbytes: int, *_: int) -> int:
        return _map(None, nbytes, PROT_NONE)

    def _cuMemAlloc(self, nbytes: int) -> int:
        return _map(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def _cuMemFree(self, _address: int) -> Result | None:
        return None

    def _cuMemMap(self, address: int, nbytes: int, _at: int, handle: int, _f: int) -> Result | None:
        if os.fstat(handle).st_size != nbytes:
            return Result.CUDA_ERROR_INVALID_VALUE
        _map(address, nbytes, PROT_NONE, handle)
        return None

    def _cuMemSetAccess(
        self, address: int, nbytes: int, accesses: list[Any], count: int
    ) -> Result | None:
        assert count == len(accesses)
        readable = self.types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if accesses[0].flags is readable:
            _LIBC.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        return None

    def _cuMemUnmap(self, address: int, nbytes: int) -> Result | None:
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)  # somebody may still look at it
        return None

    def _cuMemAddressFree(self, _address: int, _nbytes: int) -> Result | None:
        return None

    def _cuMemsetD8(self, address: int, value: int, nbytes: int) -> Result | None:
        ctypes.memset(address, value, nbytes)
        return None

    def _cuMemcpyDtoH(self, target: bytearray, source: int, nbytes: int) -> Result | None:
        target[:] = ctypes.string_at(source, nbytes)
        return None

    # --- copies -----------------------------------------------------------------------------------

    def _cuCtxSetCurrent(self, context: int) -> int:
        self._inside.context = context
        return 0

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.queueing.add(threading.current_thread().name)
        self._queued[stream].append(_Copy(target, source, nbytes))
        return 0

    def _cuMemcpyBatchAsync_v2(self, *its: Any) -> int:
        *places, count, attributes, first, num_attributes, stream = its
        assert count, "CUDA refuses to copy nothing"
        assert num_attributes == 1
        assert first._obj.value == 0
        assert attributes._obj.source_order == 1
        columns = (np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(p)) for p in places)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        self.queueing.add(threading.current_thread().name)
        self.num_copies.append(count)
        self.shares.append(sum(nbytes for _, _, nbytes in rows))
        self._queued[stream] += [_Copy(*row) for row in rows]
        return 0

    def _cuEventRecord(self, event: int, stream: int) -> int:
        self._behind[event] = list(self._queued[stream])
        self._asked.pop(event, None)
        return 0

    def _cuStreamWaitEvent(self, stream: int, event: int, _flags: int) -> int:
        self._queued[stream] += self._behind[event]
        return 0

    def _cuEventQuery(self, event: int) -> Result | None:
        self._asked[event] = 1 + self._asked.get(event, 0)
        if self._asked[event] <= self.num_refusals:
            return Result.CUDA_ERROR_NOT_READY
        for copy in self._behind[event]:
            copy.make()
        return None


NEED_NO_CONTEXT = {
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRetain",
    "cuInit",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc",
    "cuMemExportToShareableHandle",
    "cuMemFree",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
}
