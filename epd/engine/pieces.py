"""Which stored tensors make up a parameter.

Theory of operation
-------------------
Most tensors of a checkpoint are parameters, under an older name at most.  Two kinds are not.  Many
publishers store each expert of a mixture by itself, and gate and up apart, where the model
multiplies by one tensor of all experts, gate and up one behind the other; such a parameter has many
pieces, and is filled piece by piece, so that no second copy of it is ever held.  And some store
query, key and value as one tensor, which is a piece of three parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epd.engine.tensor_parallel import Cut

if TYPE_CHECKING:
    from epd.engine.models.base import ModelAdapter

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PACKED = "_packed"  # ends the name of a weight whose numbers share a byte or more
_PLACES = {
    "gate": ("gate_up_proj", 0, 2),
    "up": ("gate_up_proj", 1, 2),
    "down": ("down_proj", 0, 1),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor and its place in a parameter."""

    stored: str
    expert: int = -1  # -1: it is the whole parameter
    half: int = 0  # of that expert's rows, which of so many equal parts
    num_halves: int = 1
    part: int = 0  # of the stored tensor's rows, which of so many equal parts it is
    num_parts: int = 1

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Its place, a view."""
        if self.expert < 0:
            return parameter
        return parameter[self.expert].chunk(self.num_halves)[self.half]

    def fits(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The shape that the stored tensor has, but for transposed ones."""
        rows, *rest = self.of(parameter).shape or (1,)
        shape = (rows * self.num_parts, *rest)
        return shape if parameter.ndim else ()

    def cut(self, cut: Cut | None) -> Cut | None:
        """What a rank keeps of it; of gate and up it is the same."""
        return cut if cut is None or self.expert < 0 else Cut(cut.dim - 1, cut.kept[:1])


Sources = dict[str, list[Piece]]


def sources_of(
    adapter: ModelAdapter, held: Mapping[str, torch.Tensor]
) -> tuple[Sources, list[str]]:
    """Parameter to its pieces, and the names of the checkpoint that no parameter takes."""
    sources: Sources = {}
    taken: set[tuple[str, int, int]] = set()
    unused: list[str] = []
    for stored in adapter.checkpoint.tensors:
        found = _places(stored, adapter, held)
        fresh = [(n, p) for n, p in found if not {(n, p.expert, p.half), (n, -1, 0)} & taken]
        if not fresh:
            unused.append(stored)
        for name, piece in fresh:
            taken.add((name, piece.expert, piece.half))
            sources.setdefault(name, []).append(piece)
    return sources, unused


def missing(sources: Sources, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters that the checkpoint does not fill."""
    lacking = []
    for name, like in wanted.items():
        pieces = sources.get(name, [])
        if not pieces or sum(piece.of(like).numel() for piece in pieces) < like.numel():
            lacking.append(name)
    return sorted(lacking)


def _places(
    stored: str, adapter: ModelAdapter, held: Mapping[str, torch.Tensor]
) -> list[tuple[str, Piece]]:
    """The parameters that a stored tensor is a piece of, under the first name that the model
    knows."""
    for name in _candidates(stored, adapter.renames):
        if name in held:
            return [(name, Piece(stored))]
        if expert := _EXPERT.fullmatch(name):
            prefix, index, kind = expert.groups()
            joint, half, num_halves = _PLACES[kind]
            place = f"{prefix}.{joint}"
            if place in held and int(index) < len(held[place]):
                return [(place, Piece(stored, int(index), half, num_halves))]
        for joint, names in adapter.joint:
            each = [name.replace(joint, other) for other in names if joint in name]
            if each and all(other in held for other in each):
                count = len(names)
                parts = (Piece(stored, part=at, num_parts=count) for at in range(count))
                return list(zip(each, parts, strict=True))
    return []


def _candidates(stored: str, renames: tuple[tuple[str, str], ...]) -> Iterator[str]:
    name = stored.removesuffix(_PACKED)
    yield name
    for pattern, replacement in renames:
        before, name = name, re.sub(pattern, replacement, name)
        if name != before:
            yield name
