"""Paged attention against plain attention over each sequence alone, for any mix of extents."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.language.attention import Extent, Look, Reach, fresh_blocks, paged_attention, plan
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.state_kinds import sequence_tensor
from epd.layouts import PASSED, RowBlocks, RowKind
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
        pool.clear(fresh_blocks([Extent(0, total, table)], RowBlocks(BLOCK)))
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
    assert fresh_blocks([Extent(0, 4, table)], RowBlocks(4)) == [10]
    assert fresh_blocks([Extent(0, 5, table)], RowBlocks(4)) == [10, 11]
    assert fresh_blocks([Extent(3, 1, table)], RowBlocks(4)) == []
    assert fresh_blocks([Extent(4, 1, table)], RowBlocks(4)) == [11]
    assert fresh_blocks([Extent(3, 6, table)], RowBlocks(4)) == [11, 12]


def test_padding_at_most_doubles_the_work() -> None:
    """One long sequence among many short ones must not make the short ones long."""
    pool = KvPool(LAYOUT, BLOCKS, torch.float32, "cpu")
    lengths = [3, 4, 5, 200, 7, 90, 1]
    parts = [Extent(n, 1, list(range(-(-(n + 1) // BLOCK)))) for n in lengths]
    groups = plan(parts, pool).of_layers[0].decodes
    assert sorted(at for group in groups for at in group.at.tolist()) == list(range(7))
    padded = sum(group.blocks.numel() for group in groups)
    assert padded <= 2 * sum(len(part.table) for part in parts)


# --- layers that differ ---------------------------------------------------------------------------

SMALL = RowKind(layers=(1,), num_kv_heads=1, head_dim=DIM, block_size=2 * BLOCK)
TWO_KINDS = KvLayout(
    num_layers=2,
    block_size=2 * BLOCK,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype="float32",
    block_nbytes=2 * BLOCK * KV_HEADS * DIM * 4,
    kinds=(RowKind(layers=(0,), num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK), SMALL),
)


class Numbered(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def seen(total: int, reach: Reach, pictures: list[tuple[int, int]]) -> torch.Tensor:
    """`[total, total]` of one whole sequence, token by token."""
    rows = torch.zeros(total, total, dtype=torch.bool)
    for query in range(total):
        for key in range(total):
            together = any(a <= query < b and a <= key < b for a, b in pictures)
            sees = key <= query or (reach.both_ways and together)
            rows[query, key] = sees and (not reach.window or key > query - reach.window)
    return rows


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.integers(1, 14),
    both_ways=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_windows_pictures_and_rows_of_a_layer_before(
    cuts: list[int], window: int, both_ways: bool, seed: int
) -> None:
    """Chunk by chunk, the second of each a picture; a third layer reads the first one's rows."""
    generator = torch.Generator().manual_seed(seed)
    pool = KvPool(TWO_KINDS, BLOCKS, torch.float32, "cpu")
    for memory in pool.views(range(BLOCKS)):
        memory[:] = b"\xff" * len(memory)  # NaN: whatever is read without having been written shows
    total = sum(cuts)
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    chunks = list(zip([0, *ends], ends, strict=False))
    pictures = chunks[1::2]
    windowed = Reach(window, both_ways)
    looks = [Look(0, reach=windowed), Look(1), Look(0, writes=False, reach=windowed)]
    shapes = [(KV_HEADS, DIM), (1, DIM), (KV_HEADS, DIM)]
    rows = [torch.randn(2, heads, total, dim, generator=generator) for heads, dim in shapes]
    rows[2] = rows[0]
    queries = [torch.randn(HEADS, total, dim, generator=generator) for _, dim in shapes]
    layout = structs.replace(
        TWO_KINDS, kinds=(structs.replace(TWO_KINDS.kinds[0], window=window), SMALL)
    )
    pool.layout = layout
    table = torch.randperm(BLOCKS, generator=generator)[: layout.rows.count(total)].tolist()
    found: list[list[torch.Tensor]] = [[], [], []]
    for start, stop in chunks:
        for place in layout.rows.behind(start):
            if table[place] != PASSED:
                pool.memory[table[place]].fill_(255)  # NaN, of its next owner
            table[place] = PASSED
        extent = Extent(start, stop - start, table, [p for p in pictures if p == (start, stop)])
        pool.clear(fresh_blocks([extent], layout.rows))
        batch = plan([extent], pool, looks)
        for layer in range(3):
            key, value = rows[layer][:, None, :, start:stop]
            query = queries[layer][None, :, start:stop]
            output, _ = paged_attention(Numbered(layer), query, key, value, None, paged=batch)
            found[layer].append(output[0].transpose(0, 1))
    for layer, look in enumerate(looks):
        key, value = rows[layer].repeat_interleave(HEADS // rows[layer].shape[1], 1)
        expected = scaled_dot_product_attention(
            queries[layer][None],
            key[None],
            value[None],
            attn_mask=seen(total, look.reach, pictures),
        )[0]
        torch.testing.assert_close(torch.cat(found[layer], 1), expected, atol=1e-5, rtol=0)


def test_kinds_of_rows_share_out_the_layers() -> None:
    with pytest.raises(ValueError, match="share out"):
        structs.replace(TWO_KINDS, kinds=(SMALL,))
    with pytest.raises(ValueError, match="begin together"):
        structs.replace(TWO_KINDS, block_size=BLOCK)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), num_tokens=st.integers(0, 100))
def test_blocks_of_all_kinds_follow_each_other(sizes: list[int], num_tokens: int) -> None:
    """In one table, each at its first token; all of a kind are found by its columns."""
    kinds = tuple(structs.replace(SMALL, layers=(i,), block_size=n) for i, n in enumerate(sizes))
    unit = math.lcm(*sizes)
    layout = structs.replace(TWO_KINDS, num_layers=len(sizes), block_size=unit, kinds=kinds)
    rows = layout.rows
    count = rows.count(num_tokens)
    assert count == sum(-(-num_tokens // size) for size in sizes)
    assert num_tokens <= rows.room(count) and (not count or rows.room(count - 1) < num_tokens)
    assert rows.num_full(num_tokens) == rows.count(num_tokens // unit * unit)
    every = [column for number in range(len(sizes)) for column in layout.columns(number)]
    assert sorted(every) == list(range(len(rows.starts)))
    for number, size in enumerate(sizes):
        own = [at for at in range(count) if at % len(rows.starts) in layout.columns(number)]
        assert len(own) == -(-num_tokens // size)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    window=st.integers(1, 30),
    num_tokens=st.integers(0, 100),
    reach=st.integers(1, 12),
)
def test_blocks_behind_a_window(sizes: list[int], window: int, num_tokens: int, reach: int) -> None:
    """Token by token; all kinds but the first have the window."""
    kinds = tuple(
        structs.replace(SMALL, layers=(i,), block_size=n, window=window if i else 0)
        for i, n in enumerate(sizes)
    )
    layout = structs.replace(
        TWO_KINDS, num_layers=len(sizes), block_size=math.lcm(*sizes), kinds=kinds
    )
    rows, last = layout.rows, max(0, num_tokens - window + 1)  # that a next token sees
    seen_places, live, windowed = [], 0, 0
    for number, size in list(enumerate(sizes))[1:]:
        columns = layout.columns(number)
        places = [at for at in range(400) if at % len(rows.starts) in columns]
        seen_places += places[last // size :]
        windowed += len([at for at in places if at < num_tokens])
        seen = range(window - 1 + reach)
        live += max(len({(first + at) // size for at in seen}) for first in range(size))
    first = min(seen_places)
    behind = [at for at in range(first) if rows.num_windowed(at + 1) > rows.num_windowed(at)]
    assert list(rows.behind(num_tokens)) == behind
    assert list(rows.behind(num_tokens, 2)) == behind[2:]
    assert [rows.place(at) for at in range(len(behind))] == behind
    assert rows.num_windowed(num_tokens) == windowed
    assert rows.live(reach) == live
    total = rows.count(num_tokens)
    held = min(rows.num_windowed(total), live)
    assert rows.needed(num_tokens, reach) == total - rows.num_windowed(total) + held


def test_a_state_is_not_beside_a_window() -> None:
    tensor = sequence_tensor("state", 1, 1, (4,), torch.float32)
    kinds = (structs.replace(TWO_KINDS.kinds[0], window=4), SMALL)
    with pytest.raises(ValueError, match="not kept beside rows that are seen for a while"):
        structs.replace(TWO_KINDS, kinds=kinds, tensors=(tensor,))
