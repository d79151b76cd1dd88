"""Rows out of an engine's memory, into what a transfer reads or writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.base import Rows


def copied_out(rows: Rows, views: Sequence[memoryview]) -> None:
    """The bytes of `rows` into `views`, in order, which hold them exactly."""
    if isinstance(rows.tensor, torch.Tensor):
        source = rows.tensor.detach().contiguous().view(-1).view(torch.uint8)
    else:
        source = torch.frombuffer(rows.buffer(), dtype=torch.uint8)
    at = 0
    for view in views:
        target = torch.frombuffer(view, dtype=torch.uint8)
        target.copy_(source[at : at + view.nbytes])
        at += view.nbytes
