"""What a device is given to do for a write, from where its source lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from epd.transport.base import Buffer
from epd.transport.checksum import checksum_of
from epd.transport.cuda.device import (
    Copies,
    Device,
    Scattered,
    copies_of,
    is_on_device,
    is_scattered,
    merged,
    place_of,
)
from epd.transport.host_engine import Write

MAX_INLINE = 256  # copies that are queued on the loop: a turn of a thread takes longer


class Queued(NamedTuple):
    """A write that the device has been given."""

    passed: Callable[[], None]
    checksum: int
    failure: Exception | None


def scattered(views: Sequence[Buffer]) -> Scattered | None:
    """The source, if that is what it is."""
    return views[0] if views and is_scattered(views[0]) else None


def is_quick(write: Write) -> bool:
    """Queued in 0.2 ms: not too many copies, from the device's own memory."""
    if scattered(write.views) is not None:
        return len(write.slots) <= MAX_INLINE
    own = all(is_on_device(view) for _, view in write.pieces)
    return own and len(write.pieces) <= MAX_INLINE


class DeviceQueue:
    """Of one device; from any thread."""

    def __init__(self, device: Device, *, checksums: bool) -> None:
        self._device = device
        self._checksums = checksums
        self._order = threading.Lock()

    def mark(self) -> Callable[[], None]:
        with self._order:
            return self._device.mark()

    def put(self, base: int, write: Write) -> Queued:
        """Its copies, into a region mapped at `base`.  Raises DeviceError."""
        failure: Exception | None = None
        checksum = 0
        with self._order:
            try:
                self._copy(base, write)
                checksum = sum_of(self._device, write.views) if self._checksums else 0
            except Exception as error:
                failure = error
            return Queued(self._device.mark(), checksum, failure)

    def _copy(self, base: int, write: Write) -> None:
        own = []
        for offset, view in write.pieces:
            address, on_device = place_of(view)
            if on_device:
                own.append((base + offset, address, view.nbytes))
            else:
                self._device.upload(base + offset, address, view.nbytes)
        if len(own) == 1:
            self._device.copy(*own[0])
        elif own:
            self._copy_all(copies_of(own))
        if (source := scattered(write.views)) is not None and source.nbytes:
            slots, size = write.slots[: len(source.addresses)], source.slot_nbytes
            targets = np.array(slots, np.uint64) * size + base
            self._copy_all(merged(targets, source.addresses, size))

    def _copy_all(self, copies: Copies) -> None:
        for first in range(0, len(copies), MAX_INLINE):
            self._device.copy_all(copies[first : first + MAX_INLINE])


def sum_of(device: Device, views: Sequence[Buffer]) -> int:
    """Of what is written; blocks."""
    checksum = 0
    for view in views:
        if is_scattered(view):
            places = [(address, view.slot_nbytes) for address in view.addresses.tolist()]
        elif is_on_device(view):
            places = [(place_of(view)[0], view.nbytes)]
        else:
            checksum = checksum_of([view], checksum)
            continue
        for place in places:
            checksum = checksum_of([memoryview(device.read(*place))], checksum)
    return checksum
