"""The Triton kernels against their specification in torch, in fp64 where that is exact."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from epd.engine.kernels import Kernels, kernels_for
from epd.engine.kernels.eight_bits import FP8
from epd.engine.language.flat_batch import BatchShape, FlatBatch, FlatSequence, pack, shape_of, view
from epd.engine.language.kv_pool import KvPart, KvPool, layer_nbytes
from epd.engine.weights.host_rows import HostEmbedding
from epd.messages import KvLayout
from tests.gpu.conftest import INTERPRETED

SPECIFIED = kernels_for("cpu")

DTYPES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # to relative error of the result
BLOCK = 16
LOG2E = 1.4426950408889634


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.isfinite().all()
    return float((found - expected).norm() / expected.norm())


def dtypes(device: str) -> list[tuple[torch.dtype, float]]:
    # the interpreter has no bfloat16 arithmetic
    lacks = {"bfloat16"} if device == "cpu" and INTERPRETED else set()
    return [(getattr(torch, name), DTYPES[name]) for name in DTYPES if name not in lacks]


def short_dtypes(device: str) -> list[tuple[torch.dtype, float]]:
    """Of queries over eight bits."""
    return [(dtype, limit) for dtype, limit in dtypes(device) if dtype.itemsize == 2]


def test_norm_and_gate(kernel_device: str) -> None:
    """Rows far from zero, since a layer norm takes their mean off; a norm reads a rounded sum."""
    ops = kernels_for("cuda")
    for dtype, limit in dtypes(kernel_device):
        x, residual = torch.randn(2, 5, 200, dtype=dtype, device=kernel_device) + 3
        weight, shift = torch.randn(2, 200, dtype=dtype, device=kernel_device)
        for bias in (None, shift):
            wide = weight.double(), 1e-6, None if bias is None else bias.double()
            expected = SPECIFIED.norm(x.double(), *wide)
            assert relative(ops.norm(x, weight, 1e-6, bias), expected) < limit
            total, found = (x.float() + residual.float()).to(dtype), residual.clone()
            expected = SPECIFIED.norm(total.double(), *wide)
            assert relative(ops.norm(x, weight, 1e-6, bias, residual=found), expected) < limit
            assert torch.equal(found, total)
        for gelu in (False, True):
            expected = SPECIFIED.silu_mul(x.double(), gelu=gelu)
            assert relative(ops.silu_mul(x, gelu=gelu), expected) < limit


def test_rows_of_a_table_in_host_memory(kernel_device: str) -> None:
    """Pinned, and read by ids that are on the device; rounded once, as the specification does."""
    ops = kernels_for("cuda")
    for dtype, _ in dtypes(kernel_device):
        plain = SimpleNamespace(weight=None, scalar_embed_scale=256**0.5)
        hosted = HostEmbedding(plain, kernel_device)
        table = hosted.make(torch.Size((90, 1300)), dtype).copy_(torch.randn(90, 1300))
        ids = torch.tensor([[3, 89], [0, 3]], dtype=torch.int32)
        found = ops.gather_rows(table, ids.to(kernel_device), 16.3)
        assert torch.equal(found.cpu(), SPECIFIED.gather_rows(table, ids, 16.3))
        assert found.shape == (2, 2, 1300)
        hosted.weight = torch.nn.Parameter(table, requires_grad=False)
        if kernel_device == "cuda":
            assert table.is_pinned() and found.is_cuda
            assert torch.equal(hosted(ids.to(kernel_device)).cpu(), table[ids.long()] * 16)


def test_rows_of_eight_bits(kernel_device: str) -> None:
    """As the specification rounds them, but for a step where arithmetic before it differs."""
    ops = kernels_for("cuda")
    for dtype, _ in dtypes(kernel_device):
        for size in (200, 2560):
            x, residual = torch.randn(2, 5, 2 * size, dtype=dtype, device=kernel_device)
            x[1], residual[1] = 0, 0
            x[2, 3] = 1000
            weight = torch.randn(2 * size, dtype=dtype, device=kernel_device)
            again = residual.clone()
            found = [
                ops.scaled(x),
                ops.norm(x, weight, 1e-6, fp8=True),
                ops.norm(x, weight, 1e-6, residual=residual, fp8=True),
                ops.silu_mul(x, fp8=True),
                ops.silu_mul(x, fp8=True, gelu=True),
            ]
            expected = [
                SPECIFIED.scaled(x),
                SPECIFIED.norm(x, weight, 1e-6, fp8=True),
                SPECIFIED.norm(x, weight, 1e-6, residual=again, fp8=True),
                SPECIFIED.silu_mul(x, fp8=True),
                SPECIFIED.silu_mul(x, fp8=True, gelu=True),
            ]
            assert torch.equal(residual, again)
            if kernel_device == "cuda":
                assert torch.equal(found[0].values.float(), expected[0].values.float())
            for one, other in zip(found, expected, strict=True):
                assert relative(one.scales, other.scales) < 1e-2
                limit = 1e-2 if kernel_device == "cuda" else 0.1  # it cuts
                assert relative(one.values.float(), other.values.float()) < limit


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 300])
def test_products_of_eight_bits(rows: int, kernel_device: str) -> None:
    """Few rows and many, in parts and whole, sizes that fill no tile; the same bits every time."""
    if kernel_device == "cpu" and rows > 7:
        pytest.skip("many rows are torch's, and the interpreter is slow")
    ops = kernels_for("cuda")
    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    for size, depth in ((48, 64), (272, 1040), (2560, 2048)):
        if kernel_device == "cpu" and size > 272:
            continue
        x = ops.scaled(torch.randn(rows, depth, dtype=dtype, device=kernel_device))
        weight = ops.scaled(torch.randn(size, depth, dtype=dtype, device=kernel_device))
        for bias in (None, torch.randn(size, dtype=dtype, device=kernel_device)):
            expected = SPECIFIED.scaled_product(x, weight, bias, torch.float64)
            for _ in range(3):
                out = ops.scaled_product(x, weight, bias, dtype)
                assert out.dtype == dtype and relative(out, expected) < 4e-3
                assert torch.equal(out, ops.scaled_product(x, weight, bias, dtype))


@pytest.mark.parametrize("rows", [1, 8, 48, 64])
def test_products_of_few_rows_in_16_bits(rows: int, kernel_device: str) -> None:
    """In parts and whole, sizes that fill no tile; the same bits every time."""
    ops = kernels_for("cuda")
    small = kernel_device == "cpu"
    sizes = (
        [(48, 64), (272, 1040)] if small else [(48, 64), (272, 1040), (9728, 2560), (2560, 9728)]
    )
    for dtype, limit in dtypes(kernel_device)[1:]:
        for size, depth in sizes:
            x = torch.randn(rows, depth, dtype=dtype, device=kernel_device)
            weight = torch.randn(size, depth, dtype=dtype, device=kernel_device)
            for bias in (None, torch.randn(size, dtype=dtype, device=kernel_device)):
                wide = None if bias is None else bias.double()
                expected = SPECIFIED.product_of_few(x.double(), weight.double(), wide)
                out = ops.product_of_few(x, weight, bias)
                assert out.dtype == dtype and relative(out, expected) < limit
                assert torch.equal(out, ops.product_of_few(x, weight, bias))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 2, 80), (8, 8, 96)])
def test_rope_and_store(
    heads: int, kv_heads: int, dim: int, normed: bool, kernel_device: str
) -> None:
    ops = kernels_for("cuda")
    for dtype, limit in dtypes(kernel_device):
        tokens = 7
        slots = torch.tensor([35, 2, 3, -1, 90, 17, 18], dtype=torch.int32, device=kernel_device)
        make = lambda *shape, d=dtype: torch.randn(*shape, dtype=d, device=kernel_device)  # noqa: E731
        qkv = make(tokens, (heads + 2 * kv_heads) * dim)
        norms = (make(dim), make(dim)) if normed else None
        cos, sin = make(tokens, dim), make(tokens, dim)
        pool = make_pool(dtype, kv_heads, dim, kernel_device)
        wide = make_pool(torch.float64, kv_heads, dim, kernel_device)
        found = ops.rope_and_store(qkv, norms, 1e-6, cos, sin, slots, pool.layer(1))
        expected = SPECIFIED.rope_and_store(
            qkv.double(),
            (norms[0].double(), norms[1].double()) if norms else None,
            1e-6,
            cos.double(),
            sin.double(),
            slots,
            wide.layer(1),
        )
        assert relative(found, expected) < 2 * limit
        assert relative(pool.tensor, wide.tensor) < 2 * limit
        assert not pool.tensor[:, 0].any(), "the other layer is untouched"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 2, 80), (8, 8, 96), (8, 1, 512)]
)
def test_eight_bits_are_stored(heads: int, kv_heads: int, dim: int, kernel_device: str) -> None:
    """As the specification rounds them, but for a step where arithmetic before it differs."""
    ops = kernels_for("cuda")
    slots = torch.tensor([35, 2, 3, -1, 90, 17, 18], dtype=torch.int32, device=kernel_device)
    for dtype, _ in dtypes(kernel_device):
        make = lambda *shape, d=dtype: torch.randn(*shape, dtype=d, device=kernel_device)  # noqa: E731
        qkv = make(7, (heads + 2 * kv_heads) * dim)
        cos, sin = make(7, dim), make(7, dim)
        pools = [make_pool(FP8, kv_heads, dim, kernel_device) for _ in range(2)]
        for kernels, pool in zip((ops, SPECIFIED), pools, strict=True):
            kernels.rope_and_store(qkv, None, 1e-6, cos, sin, slots, pool.layer(1))
        for found, expected in zip(*(pool.layer(1) for pool in pools), strict=True):
            limit = 3e-2 if kernel_device == "cuda" else 0.1  # the interpreter cuts
            assert relative(meaning(found), meaning(expected)) < limit
        assert not pools[0].memory.view(8, 2, -1)[:, 0].any(), "the other layer is untouched"


def meaning(part: KvPart) -> torch.Tensor:
    return part.read(torch.arange(len(part.numbers), device=part.numbers.device), torch.float64)


@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (3, 80)])
def test_rope_of_a_tower(heads: int, dim: int, kernel_device: str) -> None:
    for dtype, limit in dtypes(kernel_device):
        qkv = torch.randn(9, 3, heads, dim, dtype=dtype, device=kernel_device)
        cos, sin = torch.randn(2, 9, dim, device=kernel_device)
        expected = qkv.double()
        SPECIFIED.rotate_pair(expected, cos.double(), sin.double())
        kernels_for("cuda").rotate_pair(qkv, cos, sin)
        assert relative(qkv, expected) < limit


def make_pool(dtype: torch.dtype, kv_heads: int, dim: int, device: str, blocks: int = 8) -> KvPool:
    nbytes = 2 * layer_nbytes(BLOCK, kv_heads, dim, dtype)
    layout = KvLayout(
        num_layers=2,
        block_size=BLOCK,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=str(dtype).removeprefix("torch."),
        block_nbytes=nbytes,
    )
    return KvPool(layout, blocks, dtype, device)


def make_batch(
    extents: list[tuple[int, int]], device: str, tile: int, padded: int = 0, at_once: int = 66
) -> tuple[FlatBatch, int]:
    """Sequences of (start, count) over scattered blocks, with room for so many more of everything,
    and how many blocks there are; decodes in parts for a device that runs so many at once."""
    sequences, num_blocks = sequences_of(extents)
    exact = shape_of([count for _, count in extents], tile)
    room = BatchShape(*(size + padded for size in exact))._replace(at_once=at_once)
    data, shape = pack(sequences, BLOCK, tile, room)
    return view(torch.from_numpy(data).to(device), shape, tile), num_blocks


def sequences_of(extents: list[tuple[int, int]]) -> tuple[list[FlatSequence], int]:
    rng = random.Random(str(extents))
    needed = [-(-(start + count) // BLOCK) for start, count in extents]
    free = rng.sample(range(sum(needed) + 3), sum(needed))
    sequences = []
    for (start, count), blocks in zip(extents, needed, strict=True):
        table = np.array([free.pop() for _ in range(blocks)], np.int32)
        sequences.append(FlatSequence([0] * count, start, table, start))
    return sequences, sum(needed) + 3


SMALL = [(0, 1), (40, 1), (130, 1), (0, 3), (33, 20), (0, 70), (100, 65)]
LARGE = [(1300 + 7 * i, 1) for i in range(24)] + [(0, 1024), (512, 777), (3000, 130), (15, 2)]


@pytest.mark.parametrize("padded", [0, 10, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 2, 64), (6, 2, 80), (8, 8, 96), (32, 8, 128), (8, 2, 256)],
)
def test_attention(
    heads: int, kv_heads: int, dim: int, padded: int, kernel_device: str, attention: Kernels
) -> None:
    """Mixed chunk lengths with history, decodes, grouped heads, rows of padding, NaN elsewhere.

    Decodes are few enough to be cut into parts, or too many for that; what pads is not written.
    """
    ops = attention
    small = kernel_device == "cpu"
    extents = SMALL if small else LARGE
    for dtype, limit in dtypes(kernel_device):
        tile = 32 if small else 64 if dtype == torch.float32 else 128
        batch, num_blocks = make_batch(extents, kernel_device, tile, padded)
        pool = make_pool(dtype, kv_heads, dim, kernel_device, num_blocks)
        pool.tensor.fill_(torch.nan)
        wide = make_pool(torch.float64, kv_heads, dim, kernel_device, num_blocks)
        fill(pool, wide, batch)
        query = torch.randn(len(batch.ids), heads, dim, dtype=dtype, device=kernel_device)
        found = ops.attend(query, pool.layer(1), batch, dim**-0.5)
        expected = SPECIFIED.attend(query.double(), wide.layer(1), batch, dim**-0.5)
        known = sum(count for _, count in extents)
        assert len(found) == known + padded
        assert relative(found[:known], expected[:known]) < limit, (dtype, extents)


def test_a_captured_step_takes_other_prompts(cuda: str, attention: Kernels) -> None:
    """It has their tables spread anew, also where what ran before left numbers that are none."""
    room = BatchShape(900, 24, 8, 23, 0, 66)
    steps = [
        [(0, 128)],
        [(700, 1), (0, 5), (77, 130), (2000, 256)],
        [(40, 1), (300, 1), (16, 16), (1000, 777)],
        [(0, 2), (0, 17), (15, 33), (127, 129), (129, 200)],
    ]
    kept = torch.zeros(1 << 16, dtype=torch.int32, device=cuda)
    flat = view(kept, room, 128)
    query = torch.randn(900, 8, 128, dtype=torch.bfloat16, device=cuda)
    pool = make_pool(query.dtype, 2, 128, cuda, 400)
    wide = make_pool(torch.float64, 2, 128, cuda, 400)
    graph, found = torch.cuda.CUDAGraph(), query
    for extents in steps:
        data, _ = pack(sequences_of(extents)[0], BLOCK, 128, room)
        kept[: len(data)].copy_(torch.from_numpy(data))
        pool.tensor.fill_(torch.nan)
        fill(pool, wide, flat)
        if found is query:
            attention.attend(query, pool.layer(1), flat, 0.1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                found = attention.attend(query, pool.layer(1), flat, 0.1)
        graph.replay()
        expected = SPECIFIED.attend(query.double(), wide.layer(1), flat, 0.1)
        known = sum(count for _, count in extents)
        assert relative(found[:known], expected[:known]) < 8e-3, extents


@pytest.mark.parametrize("padded", [0, 10])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 2, 80), (32, 8, 128)])
def test_attention_over_eight_bits(
    heads: int, kv_heads: int, dim: int, padded: int, kernel_device: str, attention: Kernels
) -> None:
    """Nothing is lost beyond what was when they were stored; NaN elsewhere, in scales too."""
    ops = attention
    small = kernel_device == "cpu"  # the interpreter has no assembly: no decodes
    extents = [extent for extent in SMALL if extent[1] > 1] if small else LARGE
    for dtype, limit in short_dtypes(kernel_device):
        tile = 32 if small else 128
        batch, num_blocks = make_batch(extents, kernel_device, tile, padded)
        pool = make_pool(FP8, kv_heads, dim, kernel_device, num_blocks)
        fill_eight_bits(pool, batch)
        query = torch.randn(len(batch.ids), heads, dim, dtype=dtype, device=kernel_device)
        found = ops.attend(query, pool.layer(1), batch, dim**-0.5)
        expected = SPECIFIED.attend(query.double(), pool.layer(1), batch, dim**-0.5)
        known = sum(count for _, count in extents)
        assert relative(found[:known], expected[:known]) < limit, (dtype, extents)


def fill_eight_bits(pool: KvPool, batch: FlatBatch, layer: int = 1, poison: int = -1) -> None:
    """Keys and values of every token that a sequence has, and NaN elsewhere, such as in the block
    of poison."""
    pool.memory.fill_(0xFF)
    device, parts = pool.memory.device, pool.layer(layer)
    size, num_kv_heads, head_dim = parts.keys.numbers.shape[1:]
    for first, length in zip(batch.indptr.tolist(), batch.seq_lens.tolist(), strict=False):
        at = torch.arange(length, device=device)
        at = at[batch.indices[first + at // size] != poison]
        place = batch.indices[first + at // size].long(), at % size
        for part in parts:
            rows = torch.randn(len(at), num_kv_heads, head_dim, device=device)
            part.write(*place, rows * torch.rand(len(at), 1, 1, device=device) * 3)


def fill(pool: KvPool, wide: KvPool, batch: FlatBatch) -> None:
    """Keys and values of every token that a sequence has; what lies behind stays as it was."""
    indptr = batch.indptr.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        for j, block in enumerate(batch.indices[indptr[i] : indptr[i + 1]].tolist()):
            count = min(BLOCK, length - j * BLOCK)
            place = pool.tensor[block, 1, :, :count]
            place.copy_(torch.randn(place.shape, device=place.device))
            wide.tensor[block, 1, :, :count] = place.double()


def test_one_tile_of_every_length(kernel_device: str) -> None:
    """Lengths around the edges of tiles and blocks."""
    ops = kernels_for("cuda")
    tile = 32 if kernel_device == "cpu" else 64
    for history in (0, 1, 15, 16, 31, 32, 33, 64):
        extents = [(history, count) for count in (2, 16, 17, 31, 32, 33)]
        batch, num_blocks = make_batch(extents, kernel_device, tile)
        pool = make_pool(torch.float32, 2, 64, kernel_device, num_blocks)
        pool.tensor.fill_(torch.nan)
        wide = make_pool(torch.float64, 2, 64, kernel_device, num_blocks)
        fill(pool, wide, batch)
        query = torch.randn(len(batch.ids), 4, 64, device=kernel_device)
        found = ops.attend(query, pool.layer(1), batch, 0.125)
        expected = SPECIFIED.attend(query.double(), wide.layer(1), batch, 0.125)
        assert relative(found, expected) < 2e-6, extents


def test_the_specification_knows_a_wrong_block(kernel_device: str) -> None:
    """A table that names another sequence's block must change the result."""
    batch, num_blocks = make_batch([(40, 1), (33, 20)], kernel_device, 32)
    pool = make_pool(torch.float32, 2, 64, kernel_device, num_blocks)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    query = torch.randn(len(batch.ids), 4, 64, device=kernel_device)
    ops = kernels_for("cuda")
    right = ops.attend(query, pool.layer(1), batch, 0.125)
    indices = batch.indices.clone()
    indices[0] = indices[-1]
    wrong = ops.attend(query, pool.layer(1), dataclasses.replace(batch, indices=indices), 0.125)
    assert relative(wrong[0], right[0]) > 0.01
    assert torch.equal(wrong[1:], right[1:])
