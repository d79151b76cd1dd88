"""What the data plane asks of a device: memory that other processes map, and copies into theirs.

`CudaDevice` (`cuda_driver.py`) is one.  Tests run it on a stand-in for NVIDIA's driver, in host
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np

from epd.transport.base import Buffer
from epd.transport.host_memory import address_of

Column = np.ndarray[Any, np.dtype[np.uint64]]


class DeviceError(Exception):
    """The device did not do what was asked of it."""


def index_of(device: str) -> int:
    """Of `cuda` or `cuda:1`."""
    return int(device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True)
class Copies:
    """One in each column of an array, uint64 `[3, n]`: addresses of targets, then of sources, then
    numbers of bytes.  A driver takes each row as it is."""

    table: Column

    def __len__(self) -> int:
        return len(self.table[2])

    def __getitem__(self, some: slice) -> Copies:
        return Copies(self.table[:, some])

    @property
    def nbytes(self) -> Column:
        nbytes: Column = self.table[2]
        return nbytes

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the rows begin in the host's memory."""
        first, step = self.table.ctypes.data, self.table.strides[0]
        return first, first + step, first + 2 * step


class DeviceMemory(Protocol):
    """Of the own device, or of a peer's and mapped for the own one."""

    address: int
    nbytes: int

    @property
    def whole(self) -> Buffer:
        """All of it, to be sliced; keeps it mapped."""

    def export(self) -> int:
        """A file descriptor by which another process maps it; the caller closes it."""

    def close(self) -> None:
        """Unmap it now: no copy that touches it is under way.  Idempotent."""


class Scattered(Protocol):
    """Slots that lie scattered on the device."""

    slot_nbytes: int
    addresses: Column  # in order

    @property
    def nbytes(self) -> int: ...


class Device(Protocol):
    """Of one instance.  What queues, and `mark`, are called by one thread at a time."""

    @property
    def domain(self) -> str:
        """Equal for two processes whose devices can write to each other's memory."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Zeroed memory that can be exported.  Raises DeviceError."""

    def open(self, fd: int, nbytes: int) -> DeviceMemory:
        """A peer's memory; the descriptor stays the caller's.  Raises DeviceError."""

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy from the host's memory; may block until that may be changed."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue one from the device's own."""

    def copy_all(self, copies: Copies) -> None:
        """Queue several, which are made in any order."""

    def mark(self) -> Callable[[], None]:
        """What blocks until all that is queued so far has passed.  Both raise DeviceError."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of the device that are final; blocks."""


# By type, since each write asks, and looking at an object takes longer than queueing a copy: a
# tensor makes its interface anew, and the `isinstance` of a protocol tries all its names.


def is_on_device(view: object) -> bool:
    """Bytes of a device, side by side."""
    return hasattr(type(view), "__cuda_array_interface__")


def is_scattered(view: object) -> TypeGuard[Scattered]:
    return hasattr(type(view), "addresses")


def place_of(view: Buffer) -> tuple[int, bool]:
    """Its address, and whether that is a device's."""
    if not is_on_device(view):
        return address_of(view), False
    if pointer := getattr(type(view), "data_ptr", None):
        return pointer(view), True
    interface = getattr(view, "__cuda_array_interface__", {})
    return interface["data"][0], True


def copies_of(rows: Sequence[tuple[int, int, int]]) -> Copies:
    """Target, source and number of bytes of each."""
    return Copies(np.ascontiguousarray(np.array(rows, np.uint64).T))


def merged(targets: Column, sources: Column, size: int) -> Copies:
    """Of slots of one size; what is side by side at both ends is one copy."""
    begins = (targets[1:] - targets[:-1] != size) | (sources[1:] - sources[:-1] != size)
    if begins.all():  # as most are
        return Copies(np.array((targets, sources, np.full_like(targets, size))))
    first = np.flatnonzero(np.append(True, begins))
    nbytes = np.diff(np.append(first, len(targets))).astype(np.uint64) * size
    return Copies(np.array((targets[first], sources[first], nbytes)))
