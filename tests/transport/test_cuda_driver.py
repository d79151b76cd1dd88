"""What NVIDIA's driver is told, with a stand-in that does it in host memory.

What the calls do there is tested on a GPU (`tests/gpu/test_cuda_transport.py`).
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.transport import cuda_driver
from epd.transport.cuda_driver import NOT_READY, CudaDevice
from epd.transport.device import Column, DeviceError, copies_of, merged
from epd.transport.host_memory import address_of

ONE = 1000  # bytes of a slot


class Result(IntEnum):
    CUDA_ERROR_LAUNCH_FAILED = 719


class Driver:
    """Its set-up, and the calls of its library: what a stream was given happens when an event
    behind it is asked for the second time, and not before."""

    CUresult = Result

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self._numbers = itertools.count(1)
        self._queued: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by stream
        self._behind: dict[int, list[tuple[int, int, int]]] = {}  # by event
        self._asked: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return MagicMock()
        if not hasattr(type(self), f"_{name}"):
            return lambda *_: (0, next(self._numbers))
        call: Callable[..., int] = getattr(self, f"_{name}")
        return lambda *its: Result.CUDA_ERROR_LAUNCH_FAILED if name == self._failing else call(*its)

    def _cuCtxSetCurrent(self, context: int) -> int:
        return 0

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self._queued[stream].append((target, source, nbytes))
        return 0

    def _cuMemcpyBatchAsync_v2(self, *its: Any) -> int:
        *places, count, _attributes, _first, _num_attributes, stream = its
        columns = (np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(p)) for p in places)
        self._queued[stream] += zip(*(column.tolist() for column in columns), strict=True)
        return 0

    def _cuEventRecord(self, event: int, stream: int) -> int:
        self._behind[event] = list(self._queued[stream])
        self._asked.discard(event)
        return 0

    def _cuStreamWaitEvent(self, stream: int, event: int, _flags: int) -> int:
        self._queued[stream] += self._behind[event]
        return 0

    def _cuEventQuery(self, event: int) -> int:
        if event not in self._asked:
            self._asked.add(event)
            return NOT_READY
        for target, source, nbytes in self._behind[event]:
            ctypes.memmove(target, source, nbytes)
        return 0


def device_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_quick", lambda: driver)
    return CudaDevice(0)


MEMORY = bytes(np.random.default_rng(0).integers(0, 256, 40 * ONE, np.uint8))


def places(memory: bytes | bytearray, slots: Iterable[int]) -> Column:
    return np.array(list(slots), np.uint64) * ONE + address_of(memoryview(memory))


@given(
    st.permutations(range(40)) | st.just(list(range(40))),
    st.lists(st.integers(0, 39), min_size=40, max_size=40) | st.just(list(range(40))),
    st.integers(1, 40),
)
def test_all_that_was_queued_has_landed_when_its_mark_has_passed(
    targets: list[int], sources: list[int], size: int
) -> None:
    target, wanted = bytearray(40 * ONE), bytearray(40 * ONE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = device_of(Driver(), monkeypatch)
        for at in range(0, 40, size):
            to, source = targets[at : at + size], sources[at : at + size]
            device.copy_all(merged(places(target, to), places(MEMORY, source), ONE))
            assert target == wanted, "nothing is copied before it is waited for"
            device.mark()()
            for slot, its in zip(to, source, strict=True):
                wanted[slot * ONE : slot * ONE + ONE] = MEMORY[its * ONE : its * ONE + ONE]
            assert target == wanted


def test_slots_side_by_side_at_both_ends_are_one_copy() -> None:
    targets, sources = [0, 1, 2, 3, 4, 6, 7], [3, 4, 5, 9, 10, 11, 2]
    copies = merged(places(MEMORY, targets), places(MEMORY, sources), ONE)
    assert copies.nbytes.tolist() == [3 * ONE, 2 * ONE, ONE, ONE]
    assert copies.targets.tolist() == places(MEMORY, [0, 3, 6, 7]).tolist()
    assert copies.sources.tolist() == places(MEMORY, [3, 9, 11, 2]).tolist()


@pytest.mark.parametrize(
    "call", ["cuMemcpyBatchAsync_v2", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"]
)
def test_a_call_that_fails_says_what_the_driver_says(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_of(Driver(failing=call), monkeypatch)
    target = address_of(memoryview(bytearray(3 * ONE)))
    source = address_of(memoryview(MEMORY))
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.copy_all(copies_of([(target, source, ONE), (target + ONE, source, ONE)]))
        device.copy(target, source, ONE)
        device.mark()()
