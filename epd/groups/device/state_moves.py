"""States of sequences head by head, as they move between ranks that share heads in other ways.

A state lies in its blocks by tensors, layers and pieces.  A rank's part of a tensor depends on its
heads: of a recurrent state their matrices, of a convolution's inputs their channels.  So the part
of one rank for another moves as one run of bytes, part behind part.  Each part has the heads that
both have, each with all layers.  Channels of a key head that value heads of several ranks read go
to each of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from epd.engine.language.kv_pool import KvPool, SequenceTensor
from epd.messages import StateTensor

Piece = tuple[range, int]  # of the heads here, and where in what landed their bytes begin


class _Tensor(NamedTuple):
    """One of a state, of all layers."""

    where: SequenceTensor
    values: torch.Tensor  # [layers * pieces, *shape]
    parts: list[torch.Tensor]  # views of the values, by head


def take_states(pool: KvPool, blocks: torch.Tensor, heads: range) -> torch.Tensor:
    """Of the state in these blocks, uint8, flat."""
    parts = [part for tensor in _read(pool, blocks) for part in tensor.parts]
    each = zip(parts, _held(pool, heads), strict=True)
    return torch.cat([part[own].flatten().view(torch.uint8) for part, (own, _) in each])


def put_states(
    pool: KvPool, blocks: torch.Tensor, landed: torch.Tensor, pieces: Sequence[Piece]
) -> None:
    """What came as these pieces becomes the state in these blocks; `landed`: uint8, not theirs."""
    tensors = _read(pool, blocks)
    parts = [part for tensor in tensors for part in tensor.parts]
    for heads, at in pieces:
        for part, (own, nbytes) in zip(parts, _held(pool, heads), strict=True):
            came = landed[at : at + nbytes].clone()  # wherever it begins
            part[own] = came.view(part.dtype).view(part[own].shape)
            at += nbytes
    for tensor in tensors:
        tensor.where.write(0, blocks[None], tensor.values[None])


def _held(pool: KvPool, heads: range) -> Iterator[tuple[slice, int]]:
    """Of each part what belongs to these heads, by their place here, and how many bytes."""
    layout, first = pool.layout, pool.layout.first_state_head
    for own, nbytes in layout.state_parts(range(first + heads.start, first + heads.stop)):
        yield slice(own.start, own.stop), len(own) * nbytes


def _read(pool: KvPool, blocks: torch.Tensor) -> list[_Tensor]:
    found = []
    for tensor, part in zip(pool.layout.tensors, pool.sequence_tensors(), strict=True):
        where = part._replace(num_pieces=tensor.num_layers * tensor.num_pieces)  # as one layer
        values = where.read(0, blocks[None])[0]
        found.append(_Tensor(where, values, _by_head(tensor, values)))
    return found


def _by_head(tensor: StateTensor, values: torch.Tensor) -> list[torch.Tensor]:
    if not tensor.parts:
        return [values.unflatten(0, (tensor.num_layers, tensor.num_pieces)).transpose(0, 1)]
    sizes = [count * width for count, width in tensor.parts]
    each = zip(values.split(sizes, -1), tensor.parts, strict=True)
    return [channels.unflatten(-1, part).movedim(-2, 0) for channels, part in each]
