"""Kernels of the decoder: one interface, in torch for any device and in Triton for CUDA.

`torch_ops` is the specification: plain, slow, right on every device and dtype.  `triton_ops` and
`triton_attention` compute the same functions on CUDA; a test holds each against the specification.
Triton is imported only by `kernels_for("cuda")`: machines without a GPU need not have it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["kernels_for"]


def kernels_for(device_type: str) -> Any:
    """The module of kernels for "cpu" or "cuda"; both have the functions of `torch_ops`."""
    if device_type == "cuda":
        from epd.engine.kernels import triton_ops

        return triton_ops
    from epd.engine.kernels import torch_ops

    return torch_ops
