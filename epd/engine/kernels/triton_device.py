"""What a device has for kernels, by which they choose how much is on its way at a time."""

from __future__ import annotations

import functools

import torch

HOPPER_SHARED_NBYTES = 227 << 10
ADA_SHARED_NBYTES = 99 << 10


@functools.cache
def shared_nbytes(device: torch.device) -> int:
    """Memory of a multiprocessor that a program may have; elsewhere that of a Hopper device."""
    if device.type != "cuda":
        return HOPPER_SHARED_NBYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def is_small(device: torch.device) -> bool:
    """Ada's memory: tiles of wide heads, and of decodes over latent rows, are smaller there."""
    return shared_nbytes(device) <= ADA_SHARED_NBYTES
