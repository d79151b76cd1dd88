"""What is kept of the tensors in one file of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.weights import stored as stored_weights
from epd.engine.weights.pieces import StoredPiece
from epd.model_files.checkpoint import ModelError

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter
    from epd.engine.kernels.packed import Packed
    from epd.groups.device.tensor_parallel import Cut


MOST_RANKS = 8  # of one host


@dataclass(frozen=True, slots=True)
class OpenFile:
    reader: Any  # of safetensors
    path: Path
    adapter: ModelAdapter
    device: str

    def tensor(
        self, name: str, piece: StoredPiece, like: torch.Tensor, cut: Cut | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Of a piece of a parameter; what is widened is so on the device."""
        checkpoint, stored = self.adapter.checkpoint, piece.stored
        is_transposed = stored_weights.shape_of(checkpoint, stored) != piece.fits(tuple(like.shape))
        if cut is not None and piece.expert >= 0:  # of gate and up a rank keeps the same
            cut = replace(cut, dim=cut.dim - 1, kept=cut.kept[:1])
        if cut is not None and is_transposed:
            cut = cut.transposed()
        packed = stored_weights.read(checkpoint, stored, self._whole)
        if packed is not None:  # whole, since its scales may be of blocks
            tensor = packed.widened().to(dtype)
            tensor = tensor if cut is None else cut.of(tensor)
        elif cut is not None:
            tensor = cut.read(self.reader.get_slice(stored))
        else:
            tensor = self.reader.get_tensor(stored)
        if piece.num_parts > 1:
            return self.adapter.of_joint(name, tensor.chunk(piece.num_parts)[piece.part])
        return tensor.transpose(1, 2) if is_transposed else tensor

    def packed(self, name: str, piece: StoredPiece, cut: Cut | None) -> Packed:
        """A weight, or this rank's part of it, as it is stored.  Raises ModelError."""
        packed = stored_weights.read(self.adapter.checkpoint, piece.stored, self._whole)
        assert packed is not None  # as was looked at before
        if cut is not None and piece.expert >= 0:  # of gate and up a rank keeps the same
            cut = replace(cut, dim=cut.dim - 1, kept=cut.kept[:1])
        return packed if cut is None else of_rank(name, packed, cut)

    def _whole(self, stored: str) -> torch.Tensor:
        """Of this file or another, on the device."""
        from safetensors import safe_open

        file = self.adapter.checkpoint.tensors[stored].file
        if file == self.path:
            return self.reader.get_tensor(stored).to(self.device)  # type: ignore[no-any-return]
        with safe_open(file, framework="pt") as elsewhere:
            return elsewhere.get_tensor(stored).to(self.device)  # type: ignore[no-any-return]


def of_rank(name: str, packed: Packed, cut: Cut) -> Packed:
    """A rank's part of a weight.  Raises ModelError with the numbers of ranks that it has borders
    for."""
    dim = cut.dim - packed.numbers.ndim
    try:
        return packed.narrowed(dim, cut.kept).copied()
    except ValueError as error:
        sizes = [str(n) for n in range(2, MOST_RANKS + 1) if _is_shared_by(n, packed, dim)]
        remedy = f"use {' or '.join(sizes)} ranks" if sizes else "use one rank"
        raise ModelError(
            f"{name} cannot be shared out to so many ranks as it is stored: {error}; {remedy}, or "
            "--dequantize"
        ) from error


def _is_shared_by(num_ranks: int, packed: Packed, dim: int) -> bool:
    size = packed.shape[dim]
    try:
        packed.narrowed(dim, [range(size // num_ranks)])
    except ValueError:
        return False
    return size % num_ranks == 0
