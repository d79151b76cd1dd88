"""Rows between a device's memory and the host's.

Blocking: for the launch thread, where a copy is queued behind the work that made the rows, or, for
rows in host memory, for a pool thread.  A completion resolves behind the copy, as for any launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.base import Rows


def on_host(rows: Rows) -> Rows:
    """A copy in host memory."""
    return Rows(rows.tensor.to("cpu"), rows.num_rows, rows.nbytes)


def on_device(rows: Rows, device: torch.device, dtype: torch.dtype, row_width: int) -> Rows:
    """A copy on `device`; `rows` may be plain bytes, as they come from a file."""
    tensor = rows.tensor
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.frombuffer(rows.buffer(), dtype=dtype).view(rows.num_rows, row_width)
    return Rows(tensor.to(device), rows.num_rows, rows.nbytes)


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
