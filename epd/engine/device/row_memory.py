"""Rows between an engine's memory and what a transfer or a storage reads or writes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from epd.engine.base import Rows


def read_bytes(buffer: Any) -> torch.Tensor:
    """uint8 over bytes that are only read, without a copy, where they are.

    torch has no tensor that may not be written and warns of every read-only buffer; so it gets the
    address, and what it is made of keeps the buffer alive.
    """
    if hasattr(buffer, "__cuda_array_interface__"):
        return torch.as_tensor(buffer, device=buffer.device)
    view = memoryview(buffer)
    piece: Any = (ctypes.c_ubyte * view.nbytes).from_address(
        np.frombuffer(view, np.uint8).ctypes.data
    )
    piece.owner = view
    return torch.frombuffer(piece, dtype=torch.uint8)


def tensor_of(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """`[num_rows, row_width]`, where they lie; what came from a storage is bytes."""
    if isinstance(rows.tensor, torch.Tensor):
        return rows.tensor
    return read_bytes(rows.buffer()).view(dtype).view(rows.num_rows, -1)


def copied_out(rows: Rows, views: Sequence[memoryview]) -> None:
    """The bytes of `rows` into `views`, in order, which hold them exactly."""
    source = tensor_of(rows, torch.uint8).detach().contiguous().view(-1).view(torch.uint8)
    at = 0
    for view in views:
        target = torch.frombuffer(view, dtype=torch.uint8)
        target.copy_(source[at : at + view.nbytes])
        at += view.nbytes
