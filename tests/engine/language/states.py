"""States of sequences in pools of ranks, made up: what one rank has, and what others have of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.language.kv_pool import KvPool
from epd.engine.sharding import Collectives, Shard

State = list[torch.Tensor]  # of each tensor `[layers, pieces, *shape]`


def rank_of(rank: int, size: int) -> Shard:
    return Shard(rank, size, Collectives())


def pool_of(adapter: ModelAdapter, shard: Shard, num_blocks: int = 0) -> KvPool:
    """With so many blocks besides those of a state."""
    layout = adapter.kv_layout(torch.float32, 4, 4, shard, torch.bfloat16)
    return KvPool(layout, layout.num_state_blocks + num_blocks, torch.float32, "cpu")


def read(pool: KvPool, blocks: Sequence[int]) -> State:
    layers, table = pool.layout.tensors[0].num_layers, _table(pool, blocks)
    return [
        torch.stack([tensor.read(layer, table)[0] for layer in range(layers)])
        for tensor in pool.sequence_tensors()
    ]


def write(pool: KvPool, blocks: Sequence[int], state: State) -> None:
    for tensor, values in zip(pool.sequence_tensors(), state, strict=True):
        for layer, its in enumerate(values):
            tensor.write(layer, _table(pool, blocks), its[None])


def _table(pool: KvPool, blocks: Sequence[int]) -> torch.Tensor:
    return torch.tensor([blocks], device=pool.memory.device)


def drawn(adapter: ModelAdapter) -> State:
    pool = pool_of(adapter, rank_of(0, 1))
    return [torch.randn_like(values) for values in read(pool, range(pool.num_blocks))]


def cut_from(whole: State, adapter: ModelAdapter, shard: Shard) -> State:
    """What a rank has of it."""
    heads = adapter.delta_heads
    assert heads is not None
    inputs, matrices = whole
    channels = [channel for kept in heads.channels(shard) for channel in kept]
    return [inputs[..., channels], matrices[:, list(heads.of(shard).queries)]]


def assert_equal(found: State, expected: State) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
