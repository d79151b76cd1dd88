"""Host memory in place of a device's: memfds, handed on and mapped as a driver's are.

`make` is a foreign backend over it (`--transport tests.transport.fake_device:make`), so that
instances in processes of their own move rows and KV as they do between GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable

from epd.transport.backend import BackendSettings
from epd.transport.cuda import CudaTransferEngine
from epd.transport.device import Copies, DeviceError
from epd.transport.host_memory import address_of

NAME = "epd-fake-device"


class FakeMemory:
    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = os.dup(fd)
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self.nbytes = nbytes
        self.address = address_of(memoryview(self._map))

    @property
    def whole(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def export(self) -> int:
        return os.dup(self._fd)

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # somebody still looks at it
                self._map.close()
            self._map = None

    def __del__(self) -> None:
        os.close(self._fd)


class FakeDevice:
    """Copies are made when they are queued; `broken` makes whatever is asked fail."""

    domain = "fake"

    def __init__(self) -> None:
        self.broken = False
        self.num_copies: list[int] = []  # of each call

    def allocate(self, nbytes: int) -> FakeMemory:
        fd = os.memfd_create(NAME)
        try:
            os.ftruncate(fd, nbytes)
            return FakeMemory(fd, nbytes)
        finally:
            os.close(fd)

    def open(self, fd: int, nbytes: int) -> FakeMemory:
        self._check()
        if os.fstat(fd).st_size != nbytes:
            raise DeviceError("CUDA_ERROR_INVALID_VALUE")
        return FakeMemory(fd, nbytes)

    def _check(self) -> None:
        if self.broken:
            raise DeviceError("CUDA_ERROR_LAUNCH_FAILED")

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._check()
        ctypes.memmove(target, source, nbytes)

    def copy_all(self, copies: Copies) -> None:
        self.num_copies.append(len(copies))
        for one in zip(*(column.tolist() for column in copies.columns), strict=True):
            self.copy(*one)

    def mark(self) -> Callable[[], None]:
        return self._check

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


def make(its: BackendSettings) -> CudaTransferEngine:
    engine = CudaTransferEngine(its, FakeDevice(), str(its.options.get("directory", "")))
    engine.kind = its.name or engine.kind
    return engine
