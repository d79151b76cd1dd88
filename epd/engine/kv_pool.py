"""The paged KV pool of one device.

One tensor, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`.  Block first: all
layers of a block are one contiguous piece, so that moving a sequence to a decode instance is one
write per block.  The memory may be handed in (`attach`) so that it is the transfer engine's
registered memory, and a received block is in place when its last byte has landed.

A block is cleared when its first slot is about to be written (`clear`).  What a former tenant left
behind would be masked anyway, but a masked NaN still poisons a sum: zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from epd.messages import KvLayout


class KvPool:
    """Paged KV memory; which block belongs to whom is the caller's business."""

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, device: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.block_nbytes
        self._dtype = dtype
        self._device = device
        self._tensor: torch.Tensor | None = None
        self.on_layer: Callable[[int], None] | None = None  # told of each `layer` asked for

    @property
    def tensor(self) -> torch.Tensor:
        """`[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; own memory unless
        `attach` came first."""
        if self._tensor is None:
            with torch.inference_mode(False):  # first use may be inside a step
                memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
                self._tensor = self._shaped(memory.view(self._dtype))
        return self._tensor

    def like(self, num_blocks: int) -> KvPool:
        """Another pool of the same shape, with memory of its own."""
        return KvPool(self.layout, num_blocks, self._dtype, self._device)

    def attach(self, buffer: memoryview) -> None:
        """Use this memory, cleared.  Raises ValueError when it does not fit or comes too late."""
        if self._tensor is not None:
            raise ValueError(
                "the KV pool has its memory already; attach once, before the first step"
            )
        if buffer.readonly:
            raise ValueError("the KV pool needs memory that it may write")
        if buffer.nbytes < self.nbytes:
            raise ValueError(f"the KV pool needs {self.nbytes} bytes, got {buffer.nbytes}")
        memory = torch.frombuffer(buffer.cast("B")[: self.nbytes], dtype=self._dtype)
        memory.zero_()  # first touch
        self._tensor = self._shaped(memory)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, views `[num_blocks, block_size, num_kv_heads, head_dim]`.

        A step asks for its layers in order, each when it is about to write it: all that it writes
        into those before is launched.
        """
        if self.on_layer is not None:
            self.on_layer(index)
        layer = self.tensor[:, index]
        return layer[:, 0], layer[:, 1]

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of blocks, writable, no copy (host memory)."""
        flat = memoryview(self.tensor.view(torch.uint8).view(-1).numpy())
        nbytes = self.layout.block_nbytes
        return [flat[block * nbytes : (block + 1) * nbytes] for block in blocks]

    def slot_views(self, slots: Sequence[int]) -> list[memoryview]:
        """The bytes of slots, in order, no copy (host memory); neighbours are one view."""
        flat = memoryview(self.tensor.view(torch.uint8).view(-1).numpy())
        nbytes = self.layout.slot_nbytes
        views: list[memoryview] = []
        first = 0
        for at in range(1, len(slots) + 1):
            if at == len(slots) or slots[at] != slots[at - 1] + 1:
                views.append(flat[slots[first] * nbytes : (slots[at - 1] + 1) * nbytes])
                first = at
        return views

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks."""
        if blocks:
            index = torch.tensor(blocks, device=self.tensor.device)
            self.tensor.index_fill_(0, index, 0)

    def _shaped(self, memory: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        return memory.view(
            self.num_blocks,
            layout.num_layers,
            2,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
