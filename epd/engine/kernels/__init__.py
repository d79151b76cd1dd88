"""Kernels of the decoder: one interface, in torch for any device and in Triton for CUDA.

The torch form of an operation is its specification: plain, slow, right on every device and dtype.
The other computes the same function on CUDA; a test holds each against its specification.  A file
is imported when one of its operations is first used: machines without a GPU need no Triton, and a
model without experts has no file of theirs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["kernels_for"]

FILES = {  # of the specification, and on CUDA
    ("torch_ops", "triton_ops"): (
        "add_rms_norm gate_heads rms_norm rope_and_store rotate_pair silu_mul"
    ),
    ("torch_ops", "triton_attention"): "attend",
    ("torch_ops", "triton_few"): "product_of_few",
    ("torch_ops", "triton_fp8"): "scaled_product",
    ("eight_bits", "triton_fp8"): "scaled",
    ("torch_delta", "triton_delta"): "convolve recall",
    ("torch_experts", "triton_experts"): "add_gated multiply_experts route",
    ("torch_latent", "triton_latent"): "attend_expanded attend_latent store_latent turn_queries",
}
OPERATIONS = {name: files for files, names in FILES.items() for name in names.split()}


class Kernels:
    """The operations as one kind of device computes them."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(f"no kernel {name}: there are {', '.join(OPERATIONS)}")
        file = OPERATIONS[name][self._on_cuda]
        kernel = getattr(import_module(f"{__name__}.{file}"), name)
        setattr(self, name, kernel)  # found without this method from now on
        return kernel


@cache
def kernels_for(device_type: str) -> Kernels:
    """Of "cpu" or "cuda"."""
    return Kernels(on_cuda=device_type == "cuda")
