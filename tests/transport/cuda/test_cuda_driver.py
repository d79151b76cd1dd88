"""What NVIDIA's driver is told; the contract of transports runs on this device, too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.transport.cuda import driver as cuda_driver
from epd.transport.cuda.device import Column, DeviceError, copies_of, is_on_device, merged, place_of
from epd.transport.cuda.driver import BATCH, POLL_S, CudaDevice, DeviceBytes
from epd.transport.host_memory import address_of
from tests.transport.device_family import num_mapped
from tests.transport.fake_device import FakeDevice
from tests.transport.stand_in_driver import GRANULARITY, StandIn

ONE = 1000  # bytes of a slot
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
    device = FakeDevice()
    for at in range(0, 40, size):
        to, source = targets[at : at + size], sources[at : at + size]
        device.copy_all(merged(places(target, to), places(MEMORY, source), ONE))
        assert target == wanted, "nothing is copied before it is waited for"
        device.mark()()
        for slot, its in zip(to, source, strict=True):
            wanted[slot * ONE : slot * ONE + ONE] = MEMORY[its * ONE : its * ONE + ONE]
        assert target == wanted
    assert sum(device.calls.shares) == 40 * ONE, "nothing twice"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40))
def test_two_streams_have_about_half_each(sizes: list[int]) -> None:
    device = FakeDevice()
    target = bytearray(360)
    rows = [(address_of(memoryview(target)), address_of(memoryview(MEMORY)), n) for n in sizes]
    device.copy_all(copies_of(rows))
    first, second = device.calls.shares
    assert first + second == sum(sizes)
    assert abs(first - second) <= 2 * max(sizes)


def test_slots_side_by_side_at_both_ends_are_one_copy() -> None:
    targets, sources = [0, 1, 2, 3, 4, 6, 7], [3, 4, 5, 9, 10, 11, 2]
    copies = merged(places(MEMORY, targets), places(MEMORY, sources), ONE)
    assert copies.nbytes.tolist() == [3 * ONE, 2 * ONE, ONE, ONE]
    assert copies.table[0].tolist() == places(MEMORY, [0, 3, 6, 7]).tolist()
    assert copies.table[1].tolist() == places(MEMORY, [3, 9, 11, 2]).tolist()


@pytest.mark.parametrize("call", [BATCH, "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_call_that_fails_says_what_the_driver_says(call: str) -> None:
    device = FakeDevice()
    device.calls.failing = call
    target = address_of(memoryview(bytearray(3 * ONE)))
    source = address_of(memoryview(MEMORY))
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.copy_all(copies_of([(target, source, ONE), (target + ONE, source, ONE)]))
        device.copy(target, source, ONE)
        device.mark()()


def test_who_waits_is_awake_while_copies_are_due_and_sleeps_before_and_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time passes by sleeping, and by a second for each look at the clock."""
    now_s, slept = 0.0, list[float]()

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        slept.append(pause_s)

    def look() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    monkeypatch.setattr(cuda_driver, "time", SimpleNamespace(sleep=sleep, perf_counter=look))
    for name, value in {"LINK_BYTES_PER_S": 10, "AWAKE_S": 3.0, "LATE": 1.5}.items():
        monkeypatch.setattr(cuda_driver, name, value)
    device = FakeDevice()
    target, source = bytearray(ONE), address_of(memoryview(MEMORY))
    address = address_of(memoryview(target))
    device.copy(address, source, 20)
    device.mark()()
    assert not slept, "it is short: awake from the beginning"
    device.copy_all(copies_of([(address, source, 90), (address, source, 10)]))
    device.mark()()
    device.copy(address, source, 30)
    device.copy(address, source, 20)
    device.mark()()
    assert slept == [7, 2], "all that was queued since the last one"
    device.calls.num_refusals = 20
    device.copy(address, source, 40)
    device.mark()()
    assert slept[2:] == [1, *[POLL_S] * 12], "asked eight times until it is late"


def test_events_are_used_again() -> None:
    device = FakeDevice()
    for _ in range(3):
        passed = [device.mark() for _ in range(2)]
        for wait in passed:
            wait()
    assert device.calls.num_events == 1 + 2


def test_any_thread_may_ask_for_anything() -> None:
    target = bytearray(2 * ONE)
    to, source = address_of(memoryview(target)), address_of(memoryview(MEMORY))
    device = FakeDevice()
    memory = device.allocate(ONE)
    fd = memory.export()
    asked: list[Callable[[], Any]] = [
        lambda: device.allocate(ONE),
        lambda: device.open(fd, ONE),
        lambda: device.copy(to, source, ONE),
        lambda: device.copy_all(copies_of([(to + ONE, source, ONE), (to, source, ONE)])),
        device.mark,
        lambda: device.read(memory.address, ONE),
        lambda: CudaDevice(0, device.calls.driver),
    ]
    found = []
    for ask in asked:
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(ask).result())
    with ThreadPoolExecutor(1) as thread:
        thread.submit(found[4]).result()
    assert target == MEMORY[:ONE] * 2


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_zeroed_mapped_elsewhere_and_gone_when_nobody_has_it() -> None:
    before = num_mapped()
    owner, writer = FakeDevice(), FakeDevice()
    memory = owner.allocate(ONE)
    assert memory.nbytes == GRANULARITY
    assert memory.read(0, GRANULARITY) == bytes(GRANULARITY)
    fd = memory.export()
    seen = writer.open(fd, ONE)
    writer.copy(seen.address + 3, address_of(memoryview(MEMORY)), 5)
    writer.mark()()
    assert memory.read(3, 5) == MEMORY[:5]
    assert num_mapped() == before + 2
    seen.close()
    assert num_mapped() == before + 1
    seen.close()
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        writer.open(fd, 2 * GRANULARITY)
    del memory, seen
    gc.collect()
    assert num_mapped() == before


def test_a_part_of_it_knows_its_place() -> None:
    device = FakeDevice()
    memory = device.allocate(4 * ONE)
    device.copy(memory.address, address_of(memoryview(MEMORY)), 4 * ONE)
    device.mark()()
    whole = DeviceBytes(memory, 0, memory.nbytes)
    part = whole[ONE : 3 * ONE][5:10]
    assert is_on_device(part)
    assert place_of(part) == (memory.address + ONE + 5, True)
    assert (len(part), part.nbytes, part.device) == (5, 5, "cuda:0")
    assert part.read() == MEMORY[ONE + 5 : ONE + 10]
    assert part.__cuda_array_interface__["shape"] == (5,)
    assert part.__cuda_array_interface__["data"][1] is False, "it may be written"
    assert len(whole[7:3]) == 0


def test_a_tensor_is_where_its_memory_is() -> None:
    class Tensor:
        """Of a device; its interface is made anew each time, and is not asked for."""

        @property
        def __cuda_array_interface__(self) -> object:
            raise AssertionError

        def data_ptr(self) -> int:
            return 4711

    tensor: Any = Tensor()
    assert place_of(tensor) == (4711, True)
    assert place_of(memoryview(MEMORY)) == (address_of(memoryview(MEMORY)), False)


# --- whether it works here ------------------------------------------------------------------------


def test_a_domain_is_of_those_that_reach_each_other() -> None:
    device = FakeDevice()
    device.calls.num_devices = 3
    assert device.domain == "00" * 16
    device.calls.peers = {2}
    assert device.domain == f"{'00' * 16},{'02' * 16}"


def test_what_a_driver_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = StandIn()
    calls.num_devices = 2
    assert calls.driver.lacks() == ""
    calls.lacking = {1}
    assert "GPU 1 cannot export memory" in calls.driver.lacks()
    monkeypatch.delattr(StandIn, f"_{BATCH}")
    assert "driver 580 or later" in calls.driver.lacks()
    calls.num_devices = 0
    assert "needs a GPU" in calls.driver.lacks()
    calls.failing = "cuInit"
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        calls.driver.lacks()
