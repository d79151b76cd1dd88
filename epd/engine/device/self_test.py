"""A small work of a device: what an instance passes before it gets work (INSTANCE, PROBING)."""

from __future__ import annotations

import torch

from epd.engine.base import EngineError


def small_work(device: str) -> None:
    """For the launch thread: a kernel behind all that is queued.  Raises EngineError where it can
    be seen that it computes something else."""
    total = torch.ones(64, device=device).sum()
    if device == "cpu" and total.item() != 64:
        raise EngineError("the device adds 64 ones to something else")
