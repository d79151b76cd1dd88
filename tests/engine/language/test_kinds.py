"""Kinds of rows in one table: where blocks lie, and what a step sees of each kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.kernels.torch_ops import attend
from epd.engine.language.flat_batch import FlatSequence, by_kind, pack, view
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.state_kinds import sequence_tensor
from epd.layouts import PASSED, RowKind
from epd.messages import KvLayout

BLOCK, KV_HEADS, HEADS, DIM, BLOCKS = 4, 2, 6, 8, 64
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


def seen(total: int, window: int, pictures: list[tuple[int, int]]) -> torch.Tensor:
    """`[total, total]` of one whole sequence, token by token."""
    rows = torch.zeros(total, total, dtype=torch.bool)
    for query in range(total):
        for key in range(total):
            together = any(a <= query < b and a <= key < b for a, b in pictures)
            rows[query, key] = (key <= query or together) and key > query - window
    return rows


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.integers(1, 14),
    both_ways=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_windows_and_pictures(cuts: list[int], window: int, both_ways: bool, seed: int) -> None:
    """Chunk by chunk, the second of each a picture, beside a decode of another sequence."""
    generator = torch.Generator().manual_seed(seed)
    kinds = (SMALL, structs.replace(TWO_KINDS.kinds[0], window=window))
    layout = structs.replace(TWO_KINDS, kinds=kinds)
    pool = KvPool(layout, BLOCKS, torch.float32, "cpu")
    pool.memory.fill_(255)  # NaN: whatever is read without having been written shows
    total, other = sum(cuts), 2 * BLOCK + 1
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    chunks = list(zip([0, *ends], ends, strict=False))
    pictures = chunks[1::2] if both_ways else []
    rows = [torch.randn(2, total, k.num_kv_heads, DIM, generator=generator) for k in kinds]
    queries = [torch.randn(total, HEADS, DIM, generator=generator) for _ in kinds]
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    tables = [[free.pop() for _ in range(layout.rows.count(n))] for n in (other, total)]
    for block in tables[0]:
        pool.memory[block].zero_()
    found: list[list[torch.Tensor]] = [[] for _ in kinds]
    for start, stop in chunks:
        for place in layout.rows.behind(start):
            if tables[1][place] != PASSED:
                pool.memory[tables[1][place]].fill_(255)  # of its next owner
            tables[1][place] = PASSED
        first, second = (
            [by_kind(np.array(t, np.int32), layout)[n] for t in tables] for n in (0, 1)
        )
        of_chunk = [p for p in pictures if p == (start, stop)]
        sequences = [
            FlatSequence([0], other - 1, first[0], 0, others=(second[0],)),
            FlatSequence([0] * (stop - start), start, first[1], 0, others=(second[1],),
                         pictures=of_chunk),
        ]  # fmt: skip
        data, shape = pack(sequences, SMALL.block_size, 64, None, kinds[1:])
        whole = view(torch.from_numpy(data), shape, 64, (), kinds[1:])
        for number, batch in enumerate((whole, *whole.others)):
            layer = pool.layer(kinds[number].layers[0])
            slots, size = batch.slots[1:].long(), kinds[number].block_size
            for part, its in zip(layer, rows[number], strict=True):
                part.write(slots // size, slots % size, its[start:stop])
            query = torch.cat([queries[number][:1], queries[number][start:stop]])
            output = attend(query, layer, batch, DIM**-0.5)
            assert not output[0].any()
            found[number].append(output[1:])
    for number, kind in enumerate(kinds):
        key, value = rows[number].repeat_interleave(HEADS // kind.num_kv_heads, 2).transpose(1, 2)
        its = pictures if kind.window else []
        expected = scaled_dot_product_attention(
            queries[number].transpose(0, 1),
            key,
            value,
            attn_mask=seen(total, kind.window or total, its),
        )
        torch.testing.assert_close(
            torch.cat(found[number]), expected.transpose(0, 1), atol=1e-5, rtol=0
        )


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
