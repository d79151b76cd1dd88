"""Copies between host and device that the launch thread does not wait for.

A copy is asynchronous only from and to pinned memory.  torch's pinned allocator reuses a piece only
when the copies queued with it have passed, so a source may be dropped at once.  What comes to the
host may be read only behind an event of the copying stream (fault F2): a launched call returns a
`Deferred` for that (see `executor`).  On a CPU all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(data: np.ndarray[Any, Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array on the device; `data` may be changed as soon as this returns."""
    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # An array takes a fourth of the time that a tensor takes to read a list.
    return upload(torch.as_tensor(np.array(values), dtype=dtype), device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in (pinned) host memory, to be read once the device has passed this point."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
