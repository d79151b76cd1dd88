"""Log-probabilities of a prompt's own tokens, from the hidden states of its chunks.

Logits of a whole chunk would be gigabytes, so the head runs over a few rows at a time, and only
what is asked for is kept.  They are of the raw logits, as those of sampled tokens are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.engine.base import Scoring
from epd.engine.device.copies import to_device, to_host
from epd.messages import TokenLogprobs

ROWS = 128  # of logits at a time
Head = Callable[[torch.Tensor], torch.Tensor]


class Scores:
    """One chunk's, on their way to the host."""

    def __init__(self, head: Head, hidden: torch.Tensor, scoring: Scoring) -> None:
        """`hidden`: of the tokens ahead of `scoring.targets`; `head` gives their logits."""
        self._targets = scoring.targets
        targets = to_device(scoring.targets, torch.int64, hidden.device)[:, None]
        found = [
            _score(head(rows), wanted, scoring.num_logprobs)
            for rows, wanted in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        ]
        self._parts = [to_host(torch.cat(part)) for part in zip(*found, strict=True)]

    def finish(self) -> tuple[TokenLogprobs, ...]:
        """Once the device has passed the step."""
        chosen, ranks, top_values, top_ids = (part.tolist() for part in self._parts)
        return tuple(
            TokenLogprobs(target, logprob, tuple(zip(ids, values, strict=True)), rank)
            for target, logprob, rank, values, ids in zip(
                self._targets, chosen, ranks, top_values, top_ids, strict=True
            )
        )


def _score(
    logits: torch.Tensor, targets: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, targets)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(num_logprobs, logprobs.shape[-1]), dim=-1)
    return chosen[:, 0], ranks, values, ids
