"""Kinds of state: what the layers of a model keep of a sequence, and how that lies in blocks.

Theory of operation
-------------------
There are two kinds.  *Paged rows*: for each token and layer a row that is written once (keys and
values of each head, or one latent row of which both are made).  A block holds the rows of
`block_size` tokens, whose shape may differ by layer, and is final when its last token has been
computed.  It can be shared, and sent while later tokens are computed.  *Sequence tensors*: for each
sequence and layer a tensor of fixed size that every token overwrites (recurrent and convolution
states).  It is that of the last token: it can be neither shared nor cut, and leaves last.  Copies
of it are kept behind some blocks for the prefix cache (`scheduling/snapshots.py`).

Both lie in blocks of one pool, and a sequence owns all of its blocks in one table, those of its
tensors first.  So admission, preemption, conservation and transfer deal with blocks only, and
memory is not divided between the kinds beforehand.  How many blocks the tensors take is in the
layout, which all instances of a cluster must share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from epd.config import ConfigError
from epd.engine.language.kv_pool import layer_nbytes
from epd.layouts import RowKind
from epd.messages import KvLayout, StateTensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A row for each token and layer."""

    num_layers: int
    num_heads: int
    head_dim: int
    num_parts: int = 2  # keys and values; 1: a latent row
    first_head: int = 0  # of those here, by its place in the model

    kinds: tuple[RowKind, ...] = ()  # where layers differ; the numbers above are of the first

    def of(self, num_layers: int) -> PagedRows:
        """Where only so many layers have them."""
        return replace(self, num_layers=num_layers)

    def token_nbytes(self, dtype: torch.dtype) -> list[int]:
        """Of one token's rows, in the layers of each kind."""
        heads = [(len(k.layers), k.num_kv_heads, k.head_dim) for k in self.kinds]
        return [
            layers * layer_nbytes(1, num_heads, head_dim, dtype, self.num_parts)
            for layers, num_heads, head_dim in
            heads or [(self.num_layers, self.num_heads, self.head_dim)]
        ]  # fmt: skip


def sequence_tensor(
    name: str,
    num_layers: int,
    num_pieces: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: tuple[tuple[int, int], ...] = (),
) -> StateTensor:
    """Of each of these layers `[num_pieces, *shape]` for each sequence."""
    return StateTensor(
        name=name,
        num_layers=num_layers,
        num_pieces=num_pieces,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        piece_nbytes=math.prod(shape) * dtype.itemsize,
        parts=parts,
    )


def layout_of(
    rows: PagedRows,
    tensors: Sequence[StateTensor],
    dtype: torch.dtype,
    block_size: int,
    max_layer_groups: int,
) -> KvLayout:
    """`dtype`: of rows.  Raises ConfigError where a block cannot hold a piece of a tensor."""
    each = rows.token_nbytes(dtype)
    # Blocks are equally large: those of a kind with smaller rows hold more tokens.
    sizes = [max(block_size, max(each) * block_size // one // 8 * 8) for one in each]
    block_nbytes = max(size * one for size, one in zip(sizes, each, strict=True))
    for tensor in tensors:
        if tensor.piece_nbytes > block_nbytes:
            raise ConfigError(
                f"a block of {block_nbytes} bytes cannot hold {tensor.piece_nbytes} bytes of a "
                f"{tensor.name} state; raise engine.block_size"
            )
    return KvLayout(
        num_layers=rows.num_layers,
        block_size=math.lcm(*sizes),
        num_kv_heads=rows.num_heads,
        head_dim=rows.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block_nbytes=block_nbytes,
        max_layer_groups=max_layer_groups,
        first_kv_head=rows.first_head,
        num_parts=rows.num_parts,
        tensors=tuple(tensors),
        kinds=tuple(
            structs.replace(kind, block_size=size)
            for kind, size in zip(rows.kinds, sizes, strict=False)
        ),
    )
