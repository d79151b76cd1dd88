"""Kernels of the decoder and the tower: one interface, in torch for any device and for CUDA.

The torch form of an operation is its specification: plain, slow, right on every device and dtype.
The others compute the same function on CUDA: in Triton, or by a library where it is installed and
the device can run it (`fast`).  A test holds each against its specification.  A file is imported
when one of its operations is first used: machines without a GPU need no Triton, and a model without
experts has no file of theirs.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["Kernels", "kernels_for"]

logger = logging.getLogger(__name__)

FILES = {  # of the specification, on CUDA, and by the library
    ("torch_ops", "triton_ops"): "gate_heads gather_rows norm rope_and_store rotate_pair silu_mul",
    ("torch_ops", "triton_attention", "fast.prompts"): "attend",
    ("torch_ops", "triton_segments", "fast.segments"): "attend_segments list_segments",
    ("torch_ops", "triton_few"): "product_of_few",
    ("packed.torch_packed", "packed.triton_packed"): ("multiply_packed_experts packed_product"),
    ("torch_ops", "triton_fp8"): "scaled_product",
    ("eight_bits", "triton_fp8"): "scaled",
    ("torch_delta", "triton_delta"): "convolve recall replay",
    ("torch_experts", "triton_experts"): "add_gated multiply_experts route",
    ("low_rank.torch_lora", "low_rank.triton_lora"): "add_low_rank",
    ("torch_latent", "triton_latent"): "attend_expanded attend_latent store_latent turn_queries",
}
OPERATIONS = {name: files for files, names in FILES.items() for name in names.split()}


class Kernels:
    """The operations as one kind of device computes them."""

    def __init__(self, *, on_cuda: bool, library: str = "") -> None:
        """`library`: name and version of the one that computes what it can, on CUDA."""
        self.attention = library or ("triton" if on_cuda else "torch")  # that of prompts and towers
        self._column = on_cuda + bool(library)

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(f"no kernel {name}: there are {', '.join(OPERATIONS)}")
        file = OPERATIONS[name][: self._column + 1][-1]
        kernel = getattr(import_module(f"{__name__}.{file}"), name)
        setattr(self, name, kernel)  # found without this method from now on
        return kernel


@cache
def kernels_for(device_type: str) -> Kernels:
    """Of "cpu" or "cuda"; there by the library, if it is installed and the device can run it."""
    if device_type != "cuda":
        return Kernels(on_cuda=False)
    from epd.engine.kernels import fast

    kernels = Kernels(on_cuda=True, library=fast.library())
    logger.info("attention of prompts and towers: %s", kernels.attention)
    return kernels
