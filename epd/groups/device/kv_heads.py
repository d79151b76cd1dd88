"""Slots of a KV pool head by head, as they move between ranks that share heads in other ways.

A slot is a few layers of a block, `[layers, num_parts, block_size, num_kv_heads, head_dim]`.  A
rank that holds other heads needs some of these only, and its part of a slot has to come in one
piece (`epd/shares.py`).  So a slot moves as `[num_kv_heads, layers, num_parts, block_size,
head_dim]`, of eight bits with each layer's scales behind its numbers."""

from __future__ import annotations

import torch

from epd.engine.language.kv_pool import KvPool


def take_heads(pool: KvPool, slots: torch.Tensor, heads: range) -> torch.Tensor:
    """These heads of each slot, uint8 `[len(slots) * len(heads), nbytes of one]`."""
    numbers, scales = _by_slot(pool)
    at, head = _places(slots, heads)
    taken = numbers[at, :, :, :, head].flatten(2).view(torch.uint8)
    if scales is not None:
        taken = torch.cat((taken, scales[at, :, :, head].flatten(2).view(torch.uint8)), -1)
    return taken.flatten(1)


def put_blocks(pool: KvPool, blocks: torch.Tensor, landed: torch.Tensor) -> None:
    """Whole blocks that came head by head, uint8 `[len(blocks), block_nbytes]`."""
    layout = pool.layout
    numbers, scales = _by_slot(pool)
    size = layout.slots_per_block
    slots = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    at, head = _places(slots, range(layout.num_kv_heads))
    layers = landed.view(len(at), layout.num_layers // size, -1)
    width = layout.num_parts * layout.block_size * layout.head_dim * numbers.itemsize
    shape = (layout.num_parts, layout.block_size, layout.head_dim)
    numbers[at, :, :, :, head] = layers[..., :width].view(numbers.dtype).unflatten(-1, shape)
    if scales is not None:
        found = layers[..., width:].contiguous().view(torch.float32)
        scales[at, :, :, head] = found.unflatten(-1, shape[:2])


def _by_slot(pool: KvPool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views: `[slots, layers, num_parts, block_size, heads, head_dim]` and, of eight bits, the
    scales `[slots, layers, num_parts, heads, block_size]`."""
    size = pool.layout.slots_per_block
    layers = pool.layout.num_layers // size
    numbers = pool.tensor if pool.tensor.itemsize > 1 else pool.tensor.view(torch.uint8)
    scales = pool.scales
    return (
        numbers.unflatten(1, (size, layers)).flatten(0, 1),
        None if scales is None else scales.unflatten(1, (size, layers)).flatten(0, 1),
    )


def _places(slots: torch.Tensor, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot and head of each piece, in order."""
    head = torch.arange(heads.start, heads.stop, device=slots.device)  # no copy to wait for
    return slots.repeat_interleave(len(heads)), head.repeat(len(slots))
