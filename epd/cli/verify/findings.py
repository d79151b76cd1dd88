"""What a row has found, and when numbers of both sides count as the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from epd.frontend import JsonObject

NAMED = 3  # of what differs


class Result(StrEnum):
    SAME = "same"
    DIFFERS = "DIFFERS"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Finding:
    result: Result
    detail: str
    numbers: JsonObject = field(default_factory=dict)  # for programs


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains, as parts of the spread (standard deviation) of the right numbers.

    Both sides multiply in another order.  In float32 that is all; in 16 bits each layer rounds, so
    only a divergence of whole distributions is telling.
    """

    largest: float  # difference of one number
    kl: float  # nats, of next-token distributions
    margin: float  # of two tokens, either of which may be chosen


TOLERANCES = {
    "float32": Tolerance(1e-3, 1e-6, 1e-3),
    "bfloat16": Tolerance(0.3, 0.02, 0.3),
    "float16": Tolerance(0.05, 0.002, 0.05),
}


def same(detail: str, **numbers: object) -> Finding:
    return Finding(Result.SAME, detail, numbers)


def differs(detail: str, **numbers: object) -> Finding:
    return Finding(Result.DIFFERS, detail, numbers)


def judged(faults: Sequence[str], detail: str, **numbers: object) -> Finding:
    """The first of `faults` are named; without any both sides are the same."""
    if not faults:
        return same(detail, **numbers)
    more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return differs("; ".join(faults[:NAMED]) + more, **numbers, faults=list(faults))


@dataclass(slots=True)
class Distance:
    """Between two sets of numbers, of the pairs that were added."""

    largest: float = 0.0
    sum: float = 0.0
    count: int = 0
    kl: float = 0.0  # the largest

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        """The largest difference of these, in spreads of the right ones."""
        spread = max(float(theirs.std()) if theirs.numel() > 1 else 1.0, 1e-6)
        apart = (ours - theirs).abs() / spread
        largest = float(apart.max())
        self.largest = max(self.largest, largest)
        self.sum += float(apart.sum())
        self.count += apart.numel()
        return largest

    def add_logits(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        left, right = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        self.kl = max(self.kl, float((left.exp() * (left - right)).sum()))
        return self.add(ours, theirs)

    @property
    def numbers(self) -> dict[str, float]:
        mean = self.sum / max(1, self.count)
        return {"largest": self.largest, "mean": mean, "kl": self.kl}

    def __str__(self) -> str:
        return f"at most {self.largest:.2g}, on average {self.sum / max(1, self.count):.2g} spreads"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part: place, both tokens, and by how much the right one was preferred."""

    place: int
    ours: int | None  # None: it has ended
    theirs: int | None
    margin: float  # in spreads of the right logits there; infinite where one has ended

    def __str__(self) -> str:
        return (
            f"part at token {self.place}: {self.ours} here, {self.theirs} there, whose logits are "
            f"{self.margin:.2g} spreads apart"
        )


def parting(ours: Sequence[int], theirs: Sequence[int], logits: torch.Tensor) -> Parting | None:
    """`logits`: of which `theirs` were chosen; None: both are the same."""
    for place in range(max(len(ours), len(theirs))):
        mine, right = (said[place] if place < len(said) else None for said in (ours, theirs))
        if mine == right:
            continue
        if mine is None or right is None:
            return Parting(place, mine, right, float("inf"))
        here = logits[place]
        margin = float((here[right] - here[mine]).abs() / max(float(here.std()), 1e-6))
        return Parting(place, mine, right, margin)
    return None
