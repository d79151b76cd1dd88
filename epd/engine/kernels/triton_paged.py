"""Where kernels of attention find the keys and values of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from epd.engine.language.kv_pool import KvLayer

RAISED = tl.constexpr(256.0)
"""Weights times scales of values, in fp16: the largest scales leave room for it, and small ones
would be below its smallest numbers without it."""


@triton.jit
def rows(  # noqa: ANN201 - parts of kernels have no types
    block, position, kv_head, stride, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Offsets of tokens in the pool."""
    return block * stride + ((position % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def scales_at(  # noqa: ANN201
    scales, block, position, kv_head, stride, ok, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Of tokens in eight bits."""
    at = block * stride + kv_head * BLOCK_SIZE + position % BLOCK_SIZE
    return tl.load(scales + at, mask=ok, other=0.0)


def pointers(layer: KvLayer) -> tuple[torch.Tensor, ...]:
    """Keys, values, and their scales; where there are none, anything."""
    numbers = [part.numbers for part in layer]
    return *numbers, *(part.numbers if part.scales is None else part.scales for part in layer)


def strides(layer: KvLayer) -> tuple[int, int]:
    """From block to block: of numbers, and of scales."""
    numbers, scales = layer.keys
    return numbers.stride(0), 0 if scales is None else scales.stride(0)
