"""KV between ranks that share heads in other ways: what each of them has in the end is its own part
of what one rank has, bit by bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from epd.engine.kernels.eight_bits import FP8
from epd.engine.language.kv_pool import KvPool, layer_nbytes
from epd.engine.sharding import WHOLE, Heads, Shard
from epd.groups.device.kv_heads import put_blocks, take_heads
from epd.messages import KvLayout
from epd.shares import Shares, cells, cut

LAYERS, BLOCK, DIM, BLOCKS = 4, 2, 4, 3


def shares(size: int, num_kv_heads: int) -> list[range]:
    shards = (Shard(rank, size, WHOLE.collectives) for rank in range(size))
    return [Heads.of(shard, num_kv_heads * 8, num_kv_heads).kv for shard in shards]


def pool_of(heads: int, dtype: torch.dtype) -> KvPool:
    layout = KvLayout(
        num_layers=LAYERS,
        block_size=BLOCK,
        num_kv_heads=heads,
        head_dim=DIM,
        dtype=str(dtype),
        block_nbytes=LAYERS * layer_nbytes(BLOCK, heads, DIM, dtype),
        max_layer_groups=2,
    )
    return KvPool(layout, BLOCKS, dtype, "cpu")


def cut_from(whole: KvPool, share: range, dtype: torch.dtype) -> KvPool:
    """What a rank of such a share has."""
    part = pool_of(len(share), dtype)
    heads = slice(share.start, share.stop)
    own, its = part.tensor.view(torch.uint8), whole.tensor.view(torch.uint8)
    own.copy_(its[:, :, :, :, heads])
    if part.scales is not None and whole.scales is not None:
        part.scales.copy_(whole.scales[:, :, :, heads])
    return part


def moved(sources: list[KvPool], consumer: Shares, producer: Shares, dtype: torch.dtype) -> None:
    """All blocks, written backwards, so that places count; landed in place."""
    whole = pool_of(max(share.stop for share in consumer), dtype)
    for rank, share in enumerate(consumer):
        pool = pool_of(len(share), dtype)
        size, by_head = pool.layout.slots_per_block, False
        slots, target = list(range(BLOCKS * size)), list(range(BLOCKS * size))[::-1]
        memory = pool.memory.view(-1)
        for cell in (cell for cell in cells(producer, consumer) if cell.consumer == rank):
            source = sources[cell.producer]
            taken = source.memory.view(len(slots), -1)
            if by_head := cell.is_cut:
                taken = take_heads(source, torch.tensor(slots), cell.source)
            at = cut(target, cell.target, len(share)) if cell.is_cut else target
            memory.view(-1, taken.shape[1])[at] = taken
        if by_head:
            blocks = torch.arange(BLOCKS)
            put_blocks(pool, blocks, pool.memory[blocks])
        expected = cut_from(whole_of(sources, producer, whole), share, dtype)
        by_slot = expected.memory.view(len(slots), -1)[target]
        assert torch.equal(pool.memory.view(len(slots), -1), by_slot), (producer, share)


def whole_of(sources: list[KvPool], producer: Shares, whole: KvPool) -> KvPool:
    for source, share in zip(sources, producer, strict=True):
        heads = slice(share.start, share.stop)
        its = source.tensor.view(torch.uint8)
        whole.tensor.view(torch.uint8)[:, :, :, :, heads] = its
        if source.scales is not None and whole.scales is not None:
            whole.scales[:, :, :, heads] = source.scales
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_each_rank_has_its_own_heads_in_the_end(dtype: torch.dtype) -> None:
    for num_kv_heads, p, c in product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 4)):
        producer, consumer = shares(p, num_kv_heads), shares(c, num_kv_heads)
        whole = pool_of(num_kv_heads, dtype)
        whole.memory.copy_(torch.randint(0, 256, whole.memory.shape, dtype=torch.uint8))
        sources = [cut_from(whole, share, dtype) for share in producer]
        moved(sources, consumer, producer, dtype)
