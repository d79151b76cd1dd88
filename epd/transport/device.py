"""What the data plane asks of a device: memory that other processes map, and copies into theirs.

`CudaDevice` (`cuda_driver.py`) is one.  In tests host memory stands for a device's, so that all but
the driver's own calls runs without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

from epd.transport.base import Buffer
from epd.transport.host_memory import address_of

PIECE_NBYTES = 64 << 20  # of the staging memory
NUM_PIECES = 4
STAGING_NBYTES = NUM_PIECES * PIECE_NBYTES


class DeviceError(Exception):
    """The device did not do what was asked of it."""


class Copy(NamedTuple):
    target: int  # addresses
    source: int
    nbytes: int


class Memory(Protocol):
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


class Gathered(Protocol):
    """Bytes that lie scattered on the device; a slice is one of them, too."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice) -> Gathered: ...

    def gather_to(self, address: int, stream: Any) -> None:
        """Queue their copies, one behind the other, to this address; from any thread."""


class Device(Protocol):
    """Of one instance.  `stage`, `copy` and `mark` are called by one thread at a time."""

    @property
    def domain(self) -> str:
        """Equal for two processes whose devices can write to each other's memory."""

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory that can be exported.  Raises DeviceError."""

    def open(self, fd: int, nbytes: int) -> Memory:
        """A peer's memory; the descriptor stays the caller's.  Raises DeviceError."""

    def stage(self, source: Gathered) -> int:
        """Queue gathering at most `PIECE_NBYTES`; the address.  Copies queued from now on wait for
        it, and it waits for those that read the same piece before."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies; several at once only from the device's own memory."""

    def mark(self) -> Callable[[], None]:
        """What blocks until all that is queued so far has passed.  Both raise DeviceError."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of the device, behind what is staged; blocks."""

    def close(self) -> None:
        """Give the staging memory back."""


# By type, since each write asks, and looking at an object takes longer than queueing a copy: a
# tensor makes its interface anew, and the `isinstance` of a protocol tries all its names.


def is_on_device(view: object) -> bool:
    """Bytes of a device, side by side."""
    return hasattr(type(view), "__cuda_array_interface__")


def is_scattered(view: object) -> TypeGuard[Gathered]:
    return hasattr(type(view), "gather_to")


def place_of(view: Buffer) -> tuple[int, bool]:
    """Its address, and whether that is a device's."""
    if not is_on_device(view):
        return address_of(view), False
    if pointer := getattr(type(view), "data_ptr", None):
        return pointer(view), True
    interface = getattr(view, "__cuda_array_interface__", {})
    return interface["data"][0], True
