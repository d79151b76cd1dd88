"""Attention in a window, pictures that are seen both ways, and heads of 512, against the
specification; rows that keys and values are made of, as Gemma 4 has them.

Where a window has passed, tables name a block of NaN: it is another's, and may not be read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from epd.engine.kernels import Kernels, kernels_for
from epd.engine.kernels.eight_bits import FP8
from epd.engine.kernels.torch_ops import attend as specified
from epd.engine.language.flat_batch import (
    BatchShape,
    FlatBatch,
    FlatSequence,
    Ints,
    pack,
    shape_of,
    view,
)
from epd.engine.language.kv_pool import KvPool, layer_nbytes
from epd.layouts import RowKind
from epd.messages import KvLayout
from tests.gpu.kernels.test_kernels import dtypes, fill_eight_bits, relative, short_dtypes

SPECIFIED = kernels_for("cpu")
FIRST, SECOND = 40, 16  # tokens in a block of each kind

Extents = list[tuple[int, int, list[tuple[int, int]]]]  # start, count, pictures
SMALL: Extents = [
    *((0, 1, []), (20, 1, []), (40, 1, []), (131, 1, [])),
    *((0, 3, []), (33, 20, []), (0, 70, [(0, 9), (10, 52)])),
    (100, 65, [(100, 111), (120, 165)]),  # it begins in a picture, and ends with one
]
LARGE: Extents = [
    *((1300 + 7 * i, 1, []) for i in range(24)),
    *((0, 1024, [(3, 283), (400, 680), (681, 1001)]), (15, 2, [])),
    *((512, 777, [(512, 600), (700, 1260)]), (3000, 130, [(3040, 3130)])),
]


def kind(kv_heads: int, dim: int, window: int) -> RowKind:
    size = SECOND if window else FIRST
    return RowKind(layers=(0,), num_kv_heads=kv_heads, head_dim=dim, window=window, block_size=size)


def tables_of(extents: Extents, size: int, window: int) -> tuple[list[Ints], int]:
    """Scattered blocks, and how many there are; the first is poison, behind the window."""
    rng, needed = random.Random(str(extents)), [-(-(a + n) // size) for a, n, _ in extents]
    free = rng.sample(range(1, sum(needed) + 4), sum(needed))
    tables = [np.array([free.pop() for _ in range(blocks)], np.int32) for blocks in needed]
    for table, (start, _, _) in zip(tables, extents, strict=True):
        table[: max(0, start + 1 - window) // size if window else 0] = 0
    return tables, sum(needed) + 4


def batch_of(
    extents: Extents, window: int, tile: int, device: str, padded: int
) -> tuple[FlatBatch, int]:
    """Of the second kind, which has this window, and how many blocks it has."""
    firsts, _ = tables_of(extents, FIRST, 0)
    seconds, num_blocks = tables_of(extents, SECOND, window)
    sequences = [
        FlatSequence([0] * count, start, first, start, others=(second,), pictures=pictures)
        for (start, count, pictures), first, second in zip(extents, firsts, seconds, strict=True)
    ]
    others = (kind(1, 16, window),)
    exact = shape_of([count for _, count, _ in extents], tile)
    room = BatchShape(*(size + padded for size in exact))._replace(at_once=20, num_others=1)
    data, shape = pack(sequences, FIRST, tile, room, others)
    (batch,) = view(torch.from_numpy(data).to(device), shape, tile, others=others).others
    return batch, num_blocks


def pool_of(dtype: torch.dtype, its: RowKind, num_blocks: int, device: str) -> KvPool:
    nbytes = layer_nbytes(its.block_size, its.num_kv_heads, its.head_dim, dtype)
    layout = KvLayout(
        num_layers=1, block_size=its.block_size, num_kv_heads=its.num_kv_heads,
        head_dim=its.head_dim, dtype=str(dtype).removeprefix("torch."), block_nbytes=nbytes,
    )  # fmt: skip
    return KvPool(layout, num_blocks, dtype, device)


def fill(pool: KvPool, wide: KvPool, batch: FlatBatch, size: int) -> None:
    """What each sequence has, but for what lies in the block of poison."""
    indptr = batch.indptr.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        for j, block in enumerate(batch.indices[indptr[i] : indptr[i + 1]].tolist()):
            place = pool.tensor[block, 0, :, : min(size, length - j * size)]
            if block:
                place.copy_(torch.randn(place.shape, device=place.device))
            wide.tensor[block, 0, :, : place.shape[1]] = place.double()


FORMS = [(1, 4, 1, 32), (24, 8, 4, 64), (24, 8, 1, 256), (24, 4, 2, 512), (512, 16, 8, 256)]


@pytest.mark.parametrize("padded", [0, 10])
@pytest.mark.parametrize(("window", "heads", "kv_heads", "dim"), FORMS)
def test_windows_and_pictures(
    window: int,
    heads: int,
    kv_heads: int,
    dim: int,
    padded: int,
    kernel_device: str,
    attention: Kernels,
) -> None:
    small = kernel_device == "cpu"
    if small and (window == 512 or (padded and dim > 32)):
        pytest.skip("the interpreter is slow")
    extents = SMALL if small else LARGE
    its = kind(kv_heads, dim, window)
    for dtype, limit in dtypes(kernel_device):
        tile = 32 if small else 64 if dtype == torch.float32 else 128
        batch, num_blocks = batch_of(extents, window, tile, kernel_device, padded)
        pool = pool_of(dtype, its, num_blocks, kernel_device)
        pool.tensor.fill_(torch.nan)
        wide = pool_of(torch.float64, its, num_blocks, kernel_device)
        fill(pool, wide, batch, SECOND)
        query = torch.randn(len(batch.ids), heads, dim, dtype=dtype, device=kernel_device)
        found = attention.attend(query, pool.layer(0), batch, dim**-0.5)
        expected = specified(query.double(), wide.layer(0), batch, dim**-0.5)
        known = sum(count for _, count, _ in extents)
        assert relative(found[:known], expected[:known]) < limit, dtype


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (16, 2)])
def test_heads_of_512_that_see_everything(
    heads: int, kv_heads: int, kernel_device: str, attention: Kernels
) -> None:
    """Tiles of queries are cut for them; blocks hold 40 tokens."""
    small = kernel_device == "cpu"
    if small and heads > 4:
        pytest.skip("the interpreter is slow")
    extents = [(start, count) for start, count, _ in (SMALL if small else LARGE)]
    its = kind(kv_heads, 512, 0)
    tables, num_blocks = tables_of([(*extent, []) for extent in extents], FIRST, 0)
    sequences = [
        FlatSequence([0] * n, start, table, start)
        for (start, n), table in zip(extents, tables, strict=True)
    ]
    for dtype, limit in dtypes(kernel_device):
        tile = 64 if small or dtype == torch.float32 else 128
        room = shape_of([n for _, n in extents], tile)._replace(at_once=20)
        data, shape = pack(sequences, FIRST, tile, room)
        batch = view(torch.from_numpy(data).to(kernel_device), shape, tile)
        pool = pool_of(dtype, its, num_blocks, kernel_device)
        pool.tensor.fill_(torch.nan)
        wide = pool_of(torch.float64, its, num_blocks, kernel_device)
        fill(pool, wide, batch, FIRST)
        query = torch.randn(len(batch.ids), heads, 512, dtype=dtype, device=kernel_device)
        found = attention.attend(query, pool.layer(0), batch, 1 / 16)
        expected = specified(query.double(), wide.layer(0), batch, 1 / 16)
        assert relative(found, expected) < limit, dtype


@pytest.fixture
def pairs(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no assembly."""
    if kernel_device == "cpu":
        decodes = pytest.importorskip("tests.gpu.kernels.test_decodes")
        monkeypatch.setattr(decodes.triton_decode_fp8, "_pairs", decodes.plain_pairs)


@pytest.mark.parametrize("padded", [0, 10])
@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "dim"),
    [(1, 4, 1, 32), (24, 8, 4, 64), (24, 8, 2, 256), (24, 4, 1, 512), (512, 16, 8, 256)],
)
def test_windows_over_eight_bits(
    window: int,
    heads: int,
    kv_heads: int,
    dim: int,
    padded: int,
    kernel_device: str,
    attention: Kernels,
    pairs: None,
) -> None:
    """Nothing is lost beyond what was when they were stored; NaN elsewhere, in scales too."""
    small = kernel_device == "cpu"
    if small and (window == 512 or padded):
        pytest.skip("the interpreter is slow")
    extents = SMALL if small else LARGE
    for dtype, limit in short_dtypes(kernel_device):
        batch, num_blocks = batch_of(extents, window, 32 if small else 128, kernel_device, padded)
        pool = pool_of(FP8, kind(kv_heads, dim, window), num_blocks, kernel_device)
        fill_eight_bits(pool, batch, 0, 0)
        query = torch.randn(len(batch.ids), heads, dim, dtype=dtype, device=kernel_device)
        found = attention.attend(query, pool.layer(0), batch, dim**-0.5)
        expected = specified(query.double(), pool.layer(0), batch, dim**-0.5)
        known = sum(count for _, count, _ in extents)
        assert relative(found[:known], expected[:known]) < max(limit, 2e-3), dtype


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (16, 2)])
def test_heads_of_512_in_eight_bits(
    heads: int,
    kv_heads: int,
    kernel_device: str,
    attention: Kernels,
    pairs: None,
) -> None:
    """That see everything, in blocks of 40 tokens; decodes in parts, beside prompts."""
    small = kernel_device == "cpu"
    if small and heads > 4:
        pytest.skip("the interpreter is slow")
    extents = [(start, count) for start, count, _ in (SMALL if small else LARGE)]
    tables, num_blocks = tables_of([(*extent, []) for extent in extents], FIRST, 0)
    sequences = [
        FlatSequence([0] * n, start, table, start)
        for (start, n), table in zip(extents, tables, strict=True)
    ]
    for dtype, limit in short_dtypes(kernel_device):
        tile = 64 if small else 128
        room = shape_of([n for _, n in extents], tile)._replace(at_once=20)
        data, shape = pack(sequences, FIRST, tile, room)
        batch = view(torch.from_numpy(data).to(kernel_device), shape, tile)
        pool = pool_of(FP8, kind(kv_heads, 512, 0), num_blocks, kernel_device)
        fill_eight_bits(pool, batch, 0)
        query = torch.randn(len(batch.ids), heads, 512, dtype=dtype, device=kernel_device)
        found = attention.attend(query, pool.layer(0), batch, 1 / 16)
        expected = specified(query.double(), pool.layer(0), batch, 1 / 16)
        assert relative(found, expected) < max(limit, 2e-3), dtype


def test_the_specification_sees_what_a_mask_admits() -> None:
    """Key by key, from a dense mask; a step later the same without what lies behind."""
    window, total, pictures = 7, 60, [(10, 31), (33, 36)]
    batch, num_blocks = batch_of([(0, total, pictures)], window, 32, "cpu", 0)
    pool = pool_of(torch.float64, kind(2, 16, window), num_blocks, "cpu")
    fill(pool, pool_of(torch.float64, kind(2, 16, window), num_blocks, "cpu"), batch, SECOND)
    query = torch.randn(total, 4, 16, dtype=torch.float64)
    place = torch.arange(total)
    seen = place[None] <= place[:, None]
    for first, stop in pictures:
        seen[first:stop, first:stop] = True
    seen &= place[None] > place[:, None] - window
    key, value = (
        part.read(batch.indices[batch.indptr[0] : batch.indptr[1]].long(), torch.float64)
        .flatten(0, 1)[:total]
        .repeat_interleave(2, dim=1)
        for part in pool.layer(0)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value)
    torch.testing.assert_close(specified(query, pool.layer(0), batch, 0.25), expected)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 2, 256), (8, 1, 512)])
def test_rows_of_queries_keys_and_values(
    heads: int, kv_heads: int, dim: int, parts: int, kernel_device: str
) -> None:
    """Keys that are values too, and queries alone; values have a norm without weights."""
    for dtype, limit in dtypes(kernel_device):
        slots = torch.tensor([35, 2, -1, 90], dtype=torch.int32, device=kernel_device)
        make = lambda *shape, d=dtype: torch.randn(*shape, dtype=d, device=kernel_device)  # noqa: E731
        qkv, cos, sin = make(4, (heads + (parts - 1) * kv_heads) * dim), make(4, dim), make(4, dim)
        norms = make(dim, d=torch.float32), make(dim, d=torch.float32)
        its = kind(kv_heads, dim, 24)
        pool = pool_of(dtype, its, 6, kernel_device)
        wide = pool_of(torch.float64, its, 6, kernel_device)
        form = {"parts": parts, "norms_values": True}
        found = kernels_for("cuda").rope_and_store(
            qkv, norms, 1e-6, cos, sin, slots, pool.layer(0), **form
        )
        gains = norms[0].double(), norms[1].double()
        turns = cos.double(), sin.double()
        expected = SPECIFIED.rope_and_store(
            qkv.double(), gains, 1e-6, *turns, slots, wide.layer(0), **form
        )
        assert relative(found, expected) < 2 * limit
        if parts > 1:
            assert relative(pool.tensor, wide.tensor) < 2 * limit
        else:
            assert not pool.tensor.any()
