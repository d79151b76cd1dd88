"""The arena gives memory out once and takes it back when nobody refers to it."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from epd.engine.device.pinned import ALIGNED_NBYTES, Arena, register


def test_pieces_are_apart_and_return() -> None:
    arena = Arena(4 * ALIGNED_NBYTES)
    pieces = [arena.take(torch.Size([2, 100]), torch.float32) for _ in range(4)]
    for i, piece in enumerate(pieces):
        assert piece is not None
        piece.fill_(i)
    assert [float(piece.mean()) for piece in pieces if piece is not None] == [0, 1, 2, 3]
    assert arena.take(torch.Size([1]), torch.uint8) is None
    view = memoryview(pieces[1].numpy())  # type: ignore[union-attr]
    del pieces, piece
    gc.collect()
    assert arena.free_nbytes == 3 * ALIGNED_NBYTES, "a view keeps its piece"
    assert view[0, 0] == 1.0
    del view
    gc.collect()
    assert arena.take(torch.Size([4 * ALIGNED_NBYTES]), torch.uint8) is not None


def test_too_much_is_refused() -> None:
    arena = Arena(ALIGNED_NBYTES)
    assert arena.take(torch.Size([2 * ALIGNED_NBYTES]), torch.uint8) is None
    assert arena.take(torch.Size([0]), torch.uint8) is None
    assert Arena(0).take(torch.Size([1]), torch.uint8) is None


def test_the_memory_lives_as_long_as_a_piece() -> None:
    arena = Arena(ALIGNED_NBYTES)
    memory, piece = weakref.ref(arena._memory), arena.take(torch.Size((4,)), torch.uint8)
    del arena
    gc.collect()
    assert memory() is not None and piece is not None
    del piece
    gc.collect()
    assert memory() is None


def test_the_collector_may_run_within_take() -> None:
    """Fault F50: pieces in cycles are collected wherever the collector runs."""
    arena = Arena(1 << 20)

    def churn() -> None:
        for threshold in (3, 5, 7, 11, 13, 17, 23, 29):
            gc.set_threshold(threshold)
            for _ in range(500):
                cycle: list[object] = [arena.take(torch.Size([16]), torch.uint8)]
                cycle.append(cycle)

    before = gc.get_threshold()
    thread = threading.Thread(target=churn, daemon=True)  # one that waits for itself is left behind
    try:
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waits for a lock that it holds"
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert arena.free_nbytes == 1 << 20


class Runtime:
    """The driver's books: what is registered."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


def test_registered_memory_outlives_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the driver goes on reading pages that are no longer at these addresses."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    class Owner:
        pass

    owner, memory = Owner(), np.zeros(ALIGNED_NBYTES, np.uint8)
    kept = weakref.ref(memory)
    register(memoryview(memory), owner)
    del memory
    gc.collect()
    assert kept() is not None and len(runtime.registered) == 1
    del owner
    gc.collect()
    assert kept() is None and not runtime.registered
