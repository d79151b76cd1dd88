"""Experts of mixtures whose weights stay as they are stored.

Theory of operation
-------------------
Publishers store each expert by itself.  What is read of one is put into its place in the memory of
all, in the form that products read. So no second copy of a layer's experts is ever held.  Of a
mixture, both weights stay or none.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from epd.engine.kernels.packed import Packed
from epd.engine.language.experts import WEIGHTS, Mixture, PackedExperts
from epd.engine.weights.packed_linear import Keeper
from epd.engine.weights.pieces import StoredPiece
from epd.model_files.checkpoint import ModelError


class _Place:
    """One weight of all experts of a layer."""

    def __init__(self, experts: PackedExperts, name: str, count: int, path: str) -> None:
        self._experts, self._name, self._count, self._path = experts, name, count, path

    def take(self, weight: Packed, piece: StoredPiece) -> None:
        """Raises ModelError where products cannot read it."""
        if weight.numbers.is_cuda:
            weight = weight.laid_out()
        try:
            if weight.numbers.is_cuda and weight.kind != "fp8" and not weight.tiled:
                raise ValueError("on a GPU, rows of 64 and columns of 128 are multiplied together")
            if piece.expert < 0:
                self._experts.hold(self._name, weight)
                return
            if self._name not in self._experts.weights:
                self._experts.hold(self._name, weight.room(self._count, piece.num_halves))
            self._experts.weights[self._name].put(piece.expert, piece.half, weight)
        except ValueError as error:
            raise ModelError(
                f"{self._path} cannot stay as it is stored: {error}; use --dequantize"
            ) from error


def exchange(layers: nn.Module, prefix: str, names: Collection[str]) -> dict[str, Keeper]:
    """The experts of these layers of a model on meta, where both weights are among `names`: by a
    weight's name, what its pieces are given to."""
    keepers: dict[str, Keeper] = {}
    for path, block in list(layers.named_modules()):
        paths = {name: f"{prefix}.{path}.experts.{name}" for name in WEIGHTS}
        if names and set(paths.values()) <= set(names) and Mixture.fits(block):
            plain = block.experts
            experts = PackedExperts(plain.act_fn)
            for name, whole in paths.items():
                keepers[whole] = _Place(experts, name, len(getattr(plain, name)), whole).take
            block.experts = experts
    return keepers
