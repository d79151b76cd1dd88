"""Host memory in place of a device's: memfds, handed on and mapped as a driver's are.

`make` is a foreign backend over it (`--transport tests.transport.fake_device:make`), so that
instances in processes of their own move rows and KV as they do between GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from epd.transport.backend import BackendSettings
from epd.transport.cuda import CudaTransferEngine
from epd.transport.device import PIECE_NBYTES, Copy, DeviceError, Gathered
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
        self.staged: list[int] = []  # bytes of each piece
        self._staging = bytearray(PIECE_NBYTES)

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

    def stage(self, source: Gathered) -> int:
        assert source.nbytes <= PIECE_NBYTES
        self.staged.append(source.nbytes)
        address = address_of(memoryview(self._staging))
        source.gather_to(address, None)
        return address

    def copy(self, copies: Sequence[Copy]) -> None:
        self._check()
        for one in copies:
            ctypes.memmove(one.target, one.source, one.nbytes)

    def mark(self) -> Callable[[], None]:
        return self._check

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def close(self) -> None:
        self._staging = bytearray()


def make(its: BackendSettings) -> CudaTransferEngine:
    engine = CudaTransferEngine(its, FakeDevice(), str(its.options.get("directory", "")))
    engine.kind = its.name or engine.kind
    return engine
