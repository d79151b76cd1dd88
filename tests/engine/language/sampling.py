"""Sampling without a step around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.base import StepFailure
from epd.engine.language.logit_rules import SampleRequest
from epd.engine.language.sampler import Draft
from epd.messages import TokenLogprobs


def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[TokenLogprobs | StepFailure]:
    """One outcome per row of `logits`, `[n, vocabulary]`.

    `logprob` of an outcome is 0.0 when none was asked for (`num_logprobs` below 0).
    """
    outcome = Draft(logits, requests).finish()
    return [outcome(row) for row in range(len(requests))]
