"""Embeddings of every layer in host memory: `engine.per_layer_embeddings` host.

Theory of operation
-------------------
Each token of an E model has a row with a part for every layer: a third of all weights.  Of these a
step reads as many rows as it has tokens.  The table lies in pinned memory, which a kernel reads
over the bus by the address that the host has, too.  So ids may be on the device alone, and steps
are captured as they are otherwise.  What is read from a file goes to that memory directly.

Memory is registered and not torch's pinned one, which is rounded up to a power of two.  Ranks of a
group have a table each, as they have one each on their devices.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from epd.config import ConfigError
from epd.engine.device.pinned import Registered, register
from epd.engine.kernels import kernels_for

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter
    from epd.engine.language.products import Foreign
    from epd.engine.weights.dummies import Homes

logger = logging.getLogger(__name__)


class HostEmbedding(nn.Module):
    """The module of transformers, over a table in host memory."""

    def __init__(self, plain: Foreign, device: str) -> None:
        super().__init__()
        self.weight, self._device = plain.weight, device
        self._factor = float(plain.scalar_embed_scale)
        self._registered = Registered()

    def make(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for its weight, pinned if the device needs that.  Raises ConfigError."""
        nbytes = shape.numel() * dtype.itemsize
        logger.info(
            "memory of the host: %-40s %7.2f GiB  %s", "per-layer embeddings", nbytes / 2**30,
            "" if self._device == "cpu" else f"pinned, for {self._device} to read",
        )  # fmt: skip
        memory = torch.empty(nbytes, dtype=torch.uint8)
        if self._device != "cpu":
            memory = register(memoryview(memory.numpy()), self._registered)
            if not memory.is_pinned():
                raise ConfigError(
                    f"the driver does not pin the {nbytes} bytes of per-layer embeddings; raise "
                    "the limit of locked memory (ulimit -l), or use engine.per_layer_embeddings "
                    "device"
                )
        # A step multiplies by the factor as the weights' dtype has it.
        self._factor = float(torch.tensor(self._factor).to(dtype))
        return memory.view(dtype).view(shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., W]`, of ids `[...]`, on their device."""
        rows: torch.Tensor = kernels_for(ids.device.type).gather_rows(
            self.weight, ids, self._factor
        )
        return rows


def exchange(model: nn.Module, adapter: ModelAdapter, device: str) -> Homes:
    """Of a model on meta: what makes the memory of the table.  Raises ConfigError where it has
    none."""
    path = adapter.family.per_layer_embeddings
    parent, _, name = path.rpartition(".")
    plain = getattr(model.get_submodule(parent), name, None) if path else None
    if plain is None:
        raise ConfigError(
            f"{adapter.checkpoint.directory} has no per-layer embeddings; leave "
            "engine.per_layer_embeddings out"
        )
    table = HostEmbedding(plain, device)
    model.set_submodule(path, table)
    return {f"{path}.weight": table.make}
