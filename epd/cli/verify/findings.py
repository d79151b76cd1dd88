"""What a row has found, and how far numbers of both sides are apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

import torch

from epd.frontend import JsonObject

NAMED = 3  # of what differs
# Both sides round, each in its own order: twice what one does, and as much again for other prompts.
FACTOR = 4


class Result(StrEnum):
    SAME = "same"
    DIFFERS = "DIFFERS"
    LEFT_OUT = "left out"


class LeftOut(Exception):
    """There is no answer here to compare with; the text has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    result: Result
    detail: str
    numbers: JsonObject = field(default_factory=dict)  # for programs


def judged(faults: Sequence[str], detail: str, **numbers: object) -> Finding:
    """The first of `faults` are named; without any both sides are the same."""
    if not faults:
        return Finding(Result.SAME, detail, numbers)
    more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    told = "; ".join(faults[:NAMED]) + more
    return Finding(Result.DIFFERS, f"{told} ({detail})", numbers | {"faults": list(faults)})


def parting(ours: Iterable[object], theirs: Iterable[object]) -> int | None:
    """The first place where two sequences differ; None: they do not."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next((place for place, (mine, right) in pairs if mine != right), None)


@dataclass(frozen=True, slots=True)
class Apart:
    """How far numbers are from the right ones, in spreads (standard deviations) of these."""

    largest: float
    mean: float
    kl: float  # nats, where the numbers are logits of one place

    @classmethod
    def of(cls, ours: torch.Tensor, theirs: torch.Tensor) -> Apart:
        mine, right = ours.double(), theirs.double()
        each = (mine - right).abs() / right.std().clamp(min=1e-6)
        kl = torch.zeros(())
        if right.ndim == 1:
            said, wanted = mine.log_softmax(-1), right.log_softmax(-1)
            kl = (wanted.exp() * (wanted - said)).sum()
        return cls(float(each.max()), float(each.mean()), float(kl))

    @classmethod
    def worst(cls, found: Sequence[Apart]) -> Apart:
        """Of several; the mean is of all."""
        if not found:
            return cls(0.0, 0.0, 0.0)
        mean = sum(one.mean for one in found) / len(found)
        return cls(max(one.largest for one in found), mean, max(one.kl for one in found))

    def within(self, rounding: Apart) -> bool:
        """Whether rounding explains it: divergence grows with the square of differences."""
        return self.largest <= FACTOR * rounding.largest and self.kl <= FACTOR**2 * rounding.kl

    def __str__(self) -> str:
        kl = f", {self.kl:.1g} nats" if self.kl else ""
        return f"{self.largest:.2g} spreads at most, {self.mean:.2g} on average{kl}"
