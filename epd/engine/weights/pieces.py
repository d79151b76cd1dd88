"""Which stored tensors make up a parameter.

Theory of operation
-------------------
Most tensors of a checkpoint are parameters, under an older name at most.  Two kinds are not.  Many
publishers store each expert of a mixture by itself, and gate and up apart.  The model multiplies by
one tensor of all experts, gate and up one behind the other.  That parameter is filled piece by
piece, so that no second copy of it is ever held.  And some store query, key and value as one
tensor, which is a piece of three parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from epd.model_files.family import Family, Shape

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MAX_DIGITS = 8
_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_PACKED = "_packed"  # ends the name of a weight whose numbers share a byte or more
_WORDS = ".qweight"  # likewise, in the place of ".weight"
_PLACES = {
    "gate": ("gate_up_proj", 0, 2),
    "up": ("gate_up_proj", 1, 2),
    "down": ("down_proj", 0, 1),
}


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A stored tensor and its place in a parameter."""

    stored: str
    expert: int = -1  # -1: it is the whole parameter
    half: int = 0  # of that expert's rows, which of so many equal parts
    num_halves: int = 1
    part: int = 0  # of the stored tensor's rows, which of so many equal parts it is
    num_parts: int = 1

    def of(self, parameter: Any) -> Any:
        """Its place in a tensor, a view."""
        if self.expert < 0:
            return parameter
        return parameter[self.expert].chunk(self.num_halves)[self.half]

    def shape_in(self, parameter: Shape) -> Shape:
        """Of its place in a parameter of this shape."""
        if self.expert < 0:
            return parameter
        return (parameter[1] // self.num_halves, *parameter[2:])

    def fits(self, parameter: Shape) -> Shape:
        """The shape that the stored tensor has, but for transposed ones."""
        place = self.shape_in(parameter)
        return (place[0] * self.num_parts, *place[1:]) if place else ()


Sources = dict[str, list[StoredPiece]]


def sources_of(
    names: Iterable[str], family: Family, held: Mapping[str, Shape]
) -> tuple[Sources, list[str]]:
    """Parameter to its pieces, and those of the checkpoint's `names` that no parameter takes.

    `held`: the parameters' shapes.
    """
    sources: Sources = {}
    taken: set[tuple[str, int, int]] = set()
    unused: list[str] = []
    known: dict[str, list[tuple[str, StoredPiece]]] = {}
    for stored in names:
        found = _found(stored, family, held, known)
        fresh = [(n, p) for n, p in found if not {(n, p.expert, p.half), (n, -1, 0)} & taken]
        if not fresh:
            unused.append(stored)
        for name, piece in fresh:
            taken.add((name, piece.expert, piece.half))
            sources.setdefault(name, []).append(piece)
    return sources, unused


def missing(sources: Sources, wanted: Mapping[str, Shape]) -> list[str]:
    """Parameters that the checkpoint does not fill."""
    lacking = []
    for name, shape in wanted.items():
        pieces = sources.get(name, [])
        filled = sum(math.prod(piece.shape_in(shape)) for piece in pieces)
        if not pieces or filled < math.prod(shape):
            lacking.append(name)
    return sorted(lacking)


def _found(
    stored: str,
    family: Family,
    held: Mapping[str, Shape],
    known: dict[str, list[tuple[str, StoredPiece]]],
) -> list[tuple[str, StoredPiece]]:
    """What `_places` finds; of many experts for the first one, which is `known` then."""
    number = _NUMBER.search(stored)
    if number is None or len(number[0]) > _MAX_DIGITS:
        return _places(stored, family, held)
    first = f"{stored[: number.start()]}0{stored[number.end() :]}"
    if first not in known:
        known[first] = _places(first, family, held)
    expert = int(number[0])
    return [
        (name, StoredPiece(stored, expert, piece.half, piece.num_halves))
        for name, piece in known[first]
        if piece.expert == 0 and expert < held[name][0]
    ]


def _places(
    stored: str, family: Family, held: Mapping[str, Shape]
) -> list[tuple[str, StoredPiece]]:
    """The parameters that a stored tensor is a piece of, under the first name that the model
    has."""
    plain = stored.removesuffix(_PACKED)
    if plain.endswith(_WORDS):
        plain = plain.removesuffix(_WORDS) + ".weight"
    for name in family.candidates(plain):
        if name in held:
            return [(name, StoredPiece(stored))]
        if expert := _EXPERT.fullmatch(name):
            prefix, index, kind = expert.groups()
            joint, half, num_halves = _PLACES[kind]
            place = f"{prefix}.{joint}"
            if place in held and index == "0":
                return [(place, StoredPiece(stored, 0, half, num_halves))]
        for joint, names in family.joint:
            each = [name.replace(joint, other) for other in names if joint in name]
            if each and all(other in held for other in each):
                count = len(names)
                parts = (StoredPiece(stored, part=at, num_parts=count) for at in range(count))
                return list(zip(each, parts, strict=True))
    return []
