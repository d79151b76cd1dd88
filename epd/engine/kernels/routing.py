"""Which experts of a mixture a token goes to, and with what weight.

Theory of operation
-------------------
A router gives each token a number for each expert.  The family decides between a softmax over all
experts and a sigmoid of each, and whether a bias and groups take part in the choice, never in the
weights.  It decides, too, whether the chosen weights sum to one.  Everything has a fixed shape and
stays on the device, so that it can be captured.

Rows that only pad a captured step go nowhere: each would read weights of more experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    top_k: int
    is_sigmoid: bool = False  # of logits in fp32; else a softmax, of logits as they are
    normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    bias: torch.Tensor | None = None  # [E], for the choice alone
    factors: torch.Tensor | None = None  # [E], of the weights of the chosen


class Routed(NamedTuple):
    """What the tokens of a step were given; a token and one of its experts are a pair."""

    experts: torch.Tensor  # int32 [T, top_k]; -1: none
    weights: torch.Tensor  # fp32 [T, top_k]
    ranks: torch.Tensor  # int32 [T, top_k]: which of its expert's pairs it is, in any order
    counts: torch.Tensor  # int32 [E]: pairs
