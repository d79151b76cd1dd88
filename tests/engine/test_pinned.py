"""The arena gives memory out once and takes it back when nobody refers to it."""

from __future__ import annotations

import gc

import torch

from epd.engine.pinned import ALIGNED_NBYTES, PinnedArena


def test_pieces_are_apart_and_return() -> None:
    arena = PinnedArena(4 * ALIGNED_NBYTES)
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
    arena = PinnedArena(ALIGNED_NBYTES)
    assert arena.take(torch.Size([2 * ALIGNED_NBYTES]), torch.uint8) is None
    assert arena.take(torch.Size([0]), torch.uint8) is None
    assert PinnedArena(0).take(torch.Size([1]), torch.uint8) is None
