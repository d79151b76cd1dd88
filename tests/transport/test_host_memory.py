"""First touch is paid when memory is made, by whatever the kernel offers."""

from __future__ import annotations

import mmap

import pytest

from epd.transport import host_memory
from epd.transport.host_memory import anonymous, touch

NBYTES = (40 << 20) + 4096 * 3 + 1  # some steps, and a part of one


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_every_page_is_resident_and_zero() -> None:
    before = resident_nbytes()
    memory = anonymous(NBYTES)
    assert resident_nbytes() - before >= NBYTES
    assert memory.nbytes == NBYTES
    assert not any(memory[::4096])


def test_an_older_kernel_gets_the_same_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MADV_POPULATE_WRITE", 9999)  # EINVAL
    before = resident_nbytes()
    memory = anonymous(NBYTES)
    assert resident_nbytes() - before >= NBYTES
    assert memory.nbytes == NBYTES


def test_memory_can_be_given_back_after_it_was_touched() -> None:
    """No address that was taken for the touch keeps the mapping open."""
    mapping = mmap.mmap(-1, NBYTES)
    touch(memoryview(mapping))
    mapping.close()
