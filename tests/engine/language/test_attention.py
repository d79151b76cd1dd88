"""Paged attention against plain attention over each sequence alone, for any mix of extents."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.language.attention import Extent, fresh_blocks, paged_attention, plan
from epd.engine.language.kv_pool import KvPool
from epd.messages import KvLayout

LAYERS, BLOCK, KV_HEADS, HEADS, DIM, BLOCKS = 2, 4, 2, 6, 8, 64
LAYOUT = KvLayout(
    num_layers=LAYERS,
    block_size=BLOCK,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype="float32",
    block_nbytes=LAYERS * 2 * BLOCK * KV_HEADS * DIM * 4,
)
extents = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12) | st.just(1)), min_size=1, max_size=5
)


class Layer(torch.nn.Module):
    layer_idx = 1


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole sequence; all `[heads, tokens, dim]`, KV heads repeated."""
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    return scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]


@given(extents=extents, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_equals_plain_attention(extents: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, "cpu")
    pool.tensor.fill_(torch.nan)  # whatever is read without having been written shows
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    parts: list[Extent] = []
    whole: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for start, count in extents:
        total = start + count
        table = [free.pop() for _ in range(-(-total // BLOCK))]
        query = torch.randn(HEADS, total, DIM, generator=generator)
        key, value = torch.randn(2, KV_HEADS, total, DIM, generator=generator)
        parts.append(Extent(start, count, table))
        whole.append((query, key, value))
        pool.clear(fresh_blocks([Extent(0, total, table)], BLOCK))
        for kind, tensor in enumerate((key, value)):
            for token in range(start):
                place = pool.tensor[table[token // BLOCK], 1, kind, token % BLOCK]
                place.copy_(tensor[:, token])

    def row(kind: int) -> torch.Tensor:
        pieces = [part[kind][:, e.start :] for part, e in zip(whole, parts, strict=True)]
        return torch.cat(pieces, dim=1)[None]

    batch = plan(parts, pool)
    output, weights = paged_attention(Layer(), row(0), row(1), row(2), None, paged=batch)
    assert weights is None
    expected = torch.cat([plain(*w)[:, e.start :] for w, e in zip(whole, parts, strict=True)], 1)
    torch.testing.assert_close(output[0].transpose(0, 1), expected, atol=1e-5, rtol=0)
    assert pool.tensor[:, 0].nan_to_num(0).abs().sum() == 0, "the other layer is untouched"


def test_new_keys_land_in_their_slots() -> None:
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, "cpu")
    key = torch.arange(3.0).view(1, 1, 3, 1).expand(1, KV_HEADS, 3, DIM)
    query = torch.zeros(1, HEADS, 3, DIM)
    paged_attention(Layer(), query, key, -key, None, paged=plan([Extent(3, 3, [9, 5])], pool))
    stored = pool.tensor[:, 1, :, :, 0, 0]
    assert stored[9, 0].tolist() == [0, 0, 0, 0] and stored[5, 0].tolist() == [1, 2, 0, 0]
    assert stored[5, 1].tolist() == [-1, -2, 0, 0]


def test_fresh_blocks_are_those_whose_first_slot_is_written() -> None:
    table = [10, 11, 12, 13]
    assert fresh_blocks([Extent(0, 4, table)], 4) == [10]
    assert fresh_blocks([Extent(0, 5, table)], 4) == [10, 11]
    assert fresh_blocks([Extent(3, 1, table)], 4) == []
    assert fresh_blocks([Extent(4, 1, table)], 4) == [11]
    assert fresh_blocks([Extent(3, 6, table)], 4) == [11, 12]


def test_padding_at_most_doubles_the_work() -> None:
    """One long sequence among many short ones must not make the short ones long."""
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, "cpu")
    lengths = [3, 4, 5, 200, 7, 90, 1]
    parts = [Extent(n, 1, list(range(-(-(n + 1) // BLOCK)))) for n in lengths]
    groups = plan(parts, pool).decodes
    assert sorted(at for group in groups for at in group.at.tolist()) == list(range(7))
    padded = sum(group.blocks.numel() for group in groups)
    assert padded <= 2 * sum(len(part.table) for part in parts)
