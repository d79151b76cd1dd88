"""The Triton kernels of latent attention against their specification, and what pads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import FP8
from epd.engine.kernels.torch_latent import Expanded
from epd.engine.language.flat_batch import (
    BatchShape,
    FlatBatch,
    FlatSequence,
    chunks_of,
    pack,
    shape_of,
    view,
)
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import Norm
from epd.engine.language.state_kinds import PagedRows, layout_of
from tests.gpu.kernels.test_kernels import dtypes, relative

SPECIFIED = kernels_for("cpu")

BLOCK = 16


class Sizes(NamedTuple):
    heads: int
    latent: int
    key: int  # numbers of a head that do not turn
    turned: int
    value: int
    ranks: int


# Kimi-K2.5 alone and on 8 ranks; odd sizes; heads that fill no program.
SIZES = {
    "cpu": [Sizes(4, 16, 12, 8, 10, 24), Sizes(3, 24, 16, 4, 16, 40), Sizes(70, 32, 16, 16, 16, 7)],
    "cuda": [
        Sizes(64, 512, 128, 64, 128, 1536),
        Sizes(8, 512, 128, 64, 128, 1536),
        Sizes(128, 512, 128, 64, 128, 512),
        Sizes(6, 24, 12, 8, 10, 24),
    ],
}
UNEVEN = {"cpu": [0, 1, 63, 500, 64, 17], "cuda": [20_000, 0, 1, 63, 64, 65, *range(900, 1500, 30)]}
CHUNKS = {
    "cpu": [(40, 1), (0, 1), (0, 2), (33, 20), (0, 70), (100, 65)],
    "cuda": [(1300, 1), (7, 1), (0, 1024), (512, 777), (3000, 130), (15, 2), (0, 64)],
}


def make_pool(sizes: Sizes, dtype: torch.dtype, device: str, num_blocks: int) -> KvPool:
    """Where nobody has written: NaN."""
    rows = PagedRows(2, 1, sizes.latent + sizes.turned, num_parts=1)
    pool = KvPool(layout_of(rows, (), dtype, BLOCK, 1), num_blocks, dtype, device)
    pool.memory.fill_(0xFF)
    return pool


def make_batch(
    extents: Sequence[tuple[int, int]], device: str, at_once: int, padded: int = 0
) -> tuple[FlatBatch, int]:
    """Sequences of (start, count) over scattered blocks, with room for so many more of everything,
    and how many blocks there are."""
    counts = [count for _, count in extents]
    needed = [-(-(start + count) // BLOCK) for start, count in extents]
    free = random.Random(str(extents)).sample(range(sum(needed) + 3), sum(needed))
    sequences = []
    for (start, count), blocks in zip(extents, needed, strict=True):
        table = np.array([free.pop() for _ in range(blocks)], np.int32)
        sequences.append(FlatSequence([0] * count, start, table, start))
    tile = 32 if device == "cpu" else 128
    room = BatchShape(*(n + padded for n in shape_of(counts, tile)[:4]), 0, at_once)
    data, shape = pack(sequences, BLOCK, tile, room)
    chunks = () if padded else chunks_of(sequences)
    return view(torch.from_numpy(data).to(device), shape, tile, chunks), sum(needed) + 3


def fill(pool: KvPool, batch: FlatBatch) -> None:
    """Rows of every token that a sequence has; what lies behind stays as it was."""
    indptr = batch.indptr.tolist()
    for i, length in enumerate(batch.seq_lens.tolist()):
        for j, block in enumerate(batch.indices[indptr[i] : indptr[i + 1]].tolist()):
            place = pool.tensor[block, 1, 0, : min(BLOCK, length - j * BLOCK)]
            place.copy_(torch.randn(place.shape, device=place.device))


def fill_eight_bits(pool: KvPool, batch: FlatBatch) -> None:
    """The same in eight bits; some rows are a thousand times as large."""
    indptr, part = batch.indptr.tolist(), pool.latent(1)
    for i, length in enumerate(batch.seq_lens.tolist()):
        places = torch.arange(length, device=batch.indices.device)
        blocks = batch.indices[indptr[i] : indptr[i + 1]].long()[places // BLOCK]
        rows = torch.randn(length, 1, part.width, device=places.device)
        part.write(
            blocks, places % BLOCK, rows * torch.where(places % 7 == 3, 1e3, 1.0)[:, None, None]
        )


def wide(pool: KvPool) -> KvPool:
    """In float64."""
    layout = pool.layout
    rows = PagedRows(layout.num_layers, 1, layout.head_dim, num_parts=1)
    device = str(pool.tensor.device)
    other = KvPool(
        layout_of(rows, (), torch.float64, BLOCK, 1), pool.num_blocks, torch.float64, device
    )
    if pool.scales is None:
        other.tensor.copy_(pool.tensor)
    else:
        blocks = torch.arange(pool.num_blocks, device=device)
        other.latent(1).numbers.copy_(pool.latent(1).read(blocks, torch.float64))
    return other


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_are_normed_turned_and_stored(interleaved: bool, kernel_device: str) -> None:
    ops = kernels_for("cuda")
    slots = torch.tensor([35, 2, 3, -1, 90, 17, 18], dtype=torch.int32, device=kernel_device)
    for sizes in SIZES[kernel_device]:
        for dtype, limit in dtypes(kernel_device):
            make = lambda *shape, d=dtype: torch.randn(*shape, dtype=d, device=kernel_device)  # noqa: E731
            rows = make(7, sizes.ranks + sizes.latent + sizes.turned)
            norms = Norm(make(sizes.ranks), 1e-6), Norm(make(sizes.latent), 1e-5)
            cos, sin = make(2, 7, sizes.turned // 2).repeat(1, 1, 2)
            query = make(7, sizes.heads, sizes.key + sizes.turned)
            found, expected = [], []
            for kernels, into, kind in ((ops, found, dtype), (SPECIFIED, expected, torch.float32)):
                pool = make_pool(sizes, kind, kernel_device, 8)
                pool.tensor.zero_()
                turns = {"cos": cos.to(kind), "sin": sin.to(kind), "interleaved": interleaved}
                given = tuple(Norm(norm.gain.to(kind), norm.eps) for norm in norms)
                into.append(
                    kernels.store_latent(
                        rows.to(kind), given, slots=slots, pool=pool.latent(1), **turns
                    )
                )
                into += [kernels.turn_queries(query.to(kind), **turns), pool.tensor[:, 1]]
                assert not pool.tensor[:, 0].any(), "the other layer is untouched"
            for one, right in zip(found, expected, strict=True):
                assert relative(one, right) < 2 * limit


def test_rows_are_stored_in_eight_bits(kernel_device: str) -> None:
    """To the number as torch stores them, with a scale for each; what pads is written nowhere."""
    slots = torch.tensor([35, 2, 3, -1, 90, 17], dtype=torch.int32, device=kernel_device)
    for sizes in SIZES[kernel_device]:
        make = lambda *shape: torch.randn(*shape, device=kernel_device)  # noqa: E731
        rows = make(6, sizes.ranks + sizes.latent + sizes.turned)
        rows[2] *= 1e4
        norms = Norm(make(sizes.ranks), 1e-6), Norm(make(sizes.latent), 1e-5)
        cos, sin = make(2, 6, sizes.turned // 2).repeat(1, 1, 2)
        found = []
        for kernels in (kernels_for("cuda"), SPECIFIED):
            pool = make_pool(sizes, FP8, kernel_device, 8)
            pool.memory.zero_()
            part = pool.latent(1)
            kernels.store_latent(rows, norms, cos, sin, slots=slots, pool=part, interleaved=True)
            assert part.scales is not None and int((part.scales > 0).sum()) == 5
            found.append(part.read(torch.arange(8, device=kernel_device), torch.float32))
            assert not pool.tensor[:, 0].view(torch.uint8).any(), "the other layer is untouched"
        assert relative(*found) < 0.01
        # A number between two of e4m3 may fall to either side; scales differ by their last bit.
        stored = [each.flatten(0, 1)[slots[slots >= 0].long()] for each in found]
        apart = ~torch.isclose(*stored, rtol=1e-5, atol=0.0)
        assert float(apart.float().mean()) < 0.01


@pytest.mark.parametrize("at_once", [1, 9, 132])
@pytest.mark.parametrize("padded", [0, 5])
def test_decodes_of_eight_bits(padded: int, at_once: int, kernel_device: str) -> None:
    """Of rows with very different scales."""
    ops = kernels_for("cuda")
    extents = [(start, 1) for start in UNEVEN[kernel_device]]
    for sizes in SIZES[kernel_device]:
        for dtype, limit in dtypes(kernel_device):
            if kernel_device == "cuda" and dtype == torch.float32:
                continue  # is refused there
            batch, num_blocks = make_batch(extents, kernel_device, at_once, padded)
            pool = make_pool(sizes, FP8, kernel_device, num_blocks)
            fill_eight_bits(pool, batch)
            query = torch.randn(sizes.heads, len(batch.ids), sizes.latent, device=kernel_device)
            query = query.to(dtype).transpose(0, 1)
            turned = torch.randn(*query.shape[:2], sizes.turned, device=kernel_device).to(dtype)
            scale = 1e-2 * (sizes.latent + sizes.turned) ** -0.5
            found = ops.attend_latent(query, turned, pool.latent(1), batch, scale)
            expected = SPECIFIED.attend_latent(
                query.double(), turned.double(), wide(pool).latent(1), batch, scale
            )
            assert relative(found, expected) < 2 * limit, (sizes, dtype)
            assert not found[len(extents) :].any()


@pytest.mark.parametrize("at_once", [1, 9, 132])
@pytest.mark.parametrize("padded", [0, 5])
def test_decodes_in_many_parts_and_few(padded: int, at_once: int, kernel_device: str) -> None:
    """Very different lengths, one token among them; NaN where nobody has written."""
    ops = kernels_for("cuda")
    extents = [(start, 1) for start in UNEVEN[kernel_device]]
    for sizes in SIZES[kernel_device]:
        for dtype, limit in dtypes(kernel_device):
            batch, num_blocks = make_batch(extents, kernel_device, at_once, padded)
            pool = make_pool(sizes, dtype, kernel_device, num_blocks)
            fill(pool, batch)
            query = torch.randn(sizes.heads, len(batch.ids), sizes.latent, device=kernel_device)
            query = query.to(dtype).transpose(0, 1)  # as a product of all heads gives it
            turned = torch.randn(*query.shape[:2], sizes.turned, device=kernel_device).to(dtype)
            scale = (sizes.latent + sizes.turned) ** -0.5
            found = ops.attend_latent(query, turned, pool.latent(1), batch, scale)
            expected = SPECIFIED.attend_latent(
                query.double(), turned.double(), wide(pool).latent(1), batch, scale
            )
            assert relative(found, expected) < limit, (sizes, dtype)
            assert not found[len(extents) :].any()


def expand(
    pool: KvPool, batch: FlatBatch, factors: torch.Tensor, sequences: range, heads: range
) -> Expanded:
    """`factors` `[heads, key and value numbers, latent]`."""
    indptr = batch.indptr.tolist()
    blocks = batch.indices[indptr[sequences.start] : indptr[sequences.stop]]
    rows = pool.latent(1).read(blocks, pool.tensor.dtype).flatten(0, 2).nan_to_num(0.0)
    own = factors[heads.start : heads.stop]
    numbers = torch.einsum("nl,hdl->nhd", rows[:, : factors.shape[2]], own)
    return Expanded(numbers, rows, BLOCK, sequences, heads.start)


def test_prompts_over_what_is_expanded(kernel_device: str) -> None:
    """Chunks with history and without, beside decodes, some sequences and some heads at a time."""
    ops = kernels_for("cuda")
    extents = CHUNKS[kernel_device]
    for sizes in SIZES[kernel_device][:2]:
        for dtype, limit in dtypes(kernel_device):
            batch, num_blocks = make_batch(extents, kernel_device, 4)
            pool = make_pool(sizes, dtype, kernel_device, num_blocks)
            fill(pool, batch)
            shape = sizes.heads, sizes.key + sizes.value, sizes.latent
            factors = torch.randn(shape, device=kernel_device).to(dtype) * sizes.latent**-0.5
            query = torch.randn(
                len(batch.ids), sizes.heads, sizes.key + sizes.turned, device=kernel_device
            ).to(dtype)
            turned = query[..., sizes.key :] + 1
            out = torch.full((*query.shape[:2], sizes.value), torch.nan, device=kernel_device)
            out, scale = out.to(dtype), (sizes.key + sizes.turned) ** -0.5
            expected = out.double()
            for sequences in (range(2, 4), range(4, len(extents))):
                for heads in (range(2), range(2, sizes.heads)):
                    expanded = expand(pool, batch, factors, sequences, heads)
                    ops.attend_expanded(query, turned, expanded, batch, scale, out)
                    expanded = expanded._replace(
                        numbers=expanded.numbers.double(), rows=expanded.rows.double()
                    )
                    SPECIFIED.attend_expanded(
                        query.double(), turned.double(), expanded, batch, scale, expected
                    )
            assert out[:2].isnan().all(), "decodes are another kernel's"
            assert relative(out[2:], expected[2:]) < limit, (sizes, dtype)
