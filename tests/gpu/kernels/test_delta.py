"""The Triton kernels of gated delta-net layers against their specification, and what pads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.torch_delta import Heads, Later
from epd.engine.language.drafts.replay import of_held
from epd.engine.language.flat_batch import BatchShape, FlatBatch, FlatSequence, pack, view
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.state_kinds import PagedRows, layout_of, sequence_tensor
from tests.gpu.kernels.test_kernels import dtypes, relative

SPECIFIED = kernels_for("cpu")

BLOCK, TILE, INPUTS, LAYERS = 16, 64, 4, 3
SIZES = {"cpu": [(2, 4, 16, 12), (1, 3, 8, 32)], "cuda": [(16, 32, 128, 128), (2, 4, 16, 12)]}
EXTENTS = [(40, 1), (0, 1), (130, 1), (0, 3), (33, 70), (9, 2), (0, 200)]


def make_heads(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Heads:
    num_keys, num_values, key_dim, value_dim = sizes
    rate, bias = -4 * torch.rand(num_values, device=device), torch.randn(num_values, device=device)
    gain = torch.randn(value_dim, dtype=dtype, device=device)
    return Heads(num_keys, num_values, key_dim, value_dim, rate, bias, gain, 1e-6)


def make_pool(heads: Heads, dtype: torch.dtype, device: str, num_sequences: int) -> KvPool:
    """Where nobody has written: NaN."""
    channels = 2 * heads.num_keys * heads.key_dim + heads.values
    matrix = heads.key_dim, heads.value_dim
    tensors = (
        sequence_tensor("convolution", LAYERS, INPUTS - 1, (channels,), dtype),
        sequence_tensor("recurrent", LAYERS, heads.num_values, matrix, torch.float32),
    )
    width = max(channels, heads.key_dim * heads.value_dim) // 16
    layout = layout_of(PagedRows(1, 2, width), tensors, dtype, BLOCK, 1)
    pool = KvPool(layout, (num_sequences + 2) * layout.num_state_blocks, dtype, device)
    pool.memory.fill_(0xFF)
    return pool


def make_batch(
    extents: Sequence[tuple[int, int]], pool: KvPool, padded: int, drafted: Sequence[int] = ()
) -> tuple[FlatBatch, list[int]]:
    """And the blocks that are a sequence's."""
    size = pool.layout.num_state_blocks
    free = random.Random(5).sample(range(pool.num_blocks), size * len(extents))
    tables = np.array(free, np.int32).reshape(len(extents), size)
    sequences = []
    for i, (start, count) in enumerate(extents):
        cuts = [(at, 1) for at in range(count)] if i in drafted else [(0, count)]
        for at, length in cuts:
            run = 1 if i not in drafted else 0 if at else -count
            place = start + at, np.arange(20, dtype=np.int32), start + at
            sequences.append(FlatSequence([0] * length, *place, state=tables[i], run=run))
    _, exact = pack(sequences, BLOCK, TILE)
    room = BatchShape(*(n + padded for n in exact[:4]), size)
    data, _ = pack(sequences, BLOCK, TILE, room)
    batch = view(torch.from_numpy(data).to(pool.tensor.device), room, TILE)
    tables = torch.from_numpy(tables).to(batch.states.device).long()
    for tensor in pool.sequence_tensors():
        for layer in range(LAYERS):
            tensor.write(layer, tables, torch.randn_like(tensor.read(layer, tables).float()))
    return batch, free


@pytest.mark.parametrize(("padded", "alike"), [(0, False), (5, False), (0, True)])
def test_states_are_read_and_written_in_place(padded: int, alike: bool, kernel_device: str) -> None:
    """Beginnings and later tokens, chunks behind them, pieces over several blocks; no block of
    nobody is read or written, and what pads answers nothing.  `alike`: one token again and again,
    so that each key recalls all that were before."""
    extents = EXTENTS
    for (dtype, limit), sizes in zip(dtypes(kernel_device), 2 * SIZES[kernel_device], strict=False):
        heads = make_heads(sizes, dtype, kernel_device)
        pool = make_pool(heads, dtype, kernel_device, len(extents))
        batch, owned = make_batch(extents, pool, padded)
        other, before = (pool.like(pool.num_blocks) for _ in range(2))
        for copy in (other, before):
            copy.memory.copy_(pool.memory)
        make = lambda size: torch.randn(len(batch.ids), size, device=kernel_device).to(dtype)  # noqa: B023, E731
        channels = 2 * heads.num_keys * heads.key_dim + heads.values
        whole = make(channels + heads.values + 2 * heads.num_values)
        if alike:
            whole = whole[:1].expand_as(whole).contiguous()
        rows, gates, strengths = whole.tensor_split([channels, channels + heads.values], -1)
        taps = torch.randn(INPUTS, channels, device=kernel_device).to(dtype)
        found = []
        for ops, kept in ((kernels_for("cuda"), pool), (SPECIFIED, other)):
            inputs, matrices = kept.sequence_tensors()
            mixed = ops.convolve(rows, taps, inputs, 1, batch)
            answers = ops.recall(mixed, gates, strengths, heads, matrices, 1, batch)
            found.append((mixed, answers))
        known = sum(count for _, count in extents)
        for one, right in zip(*found, strict=True):
            assert relative(one[:known], right[:known]) < 3 * limit, dtype
        assert not found[0][1][known:].any()
        _check_states(pool, other, before, batch, owned, 5 * limit)


def test_states_are_those_of_the_drafts_that_hold(kernel_device: str) -> None:
    """A step with drafts answers as chunks of these tokens would and writes no state of theirs;
    what is replayed then, of all layers at once, leaves what chunks of those that hold leave."""
    extents, held = [(40, 1), (33, 5), (9, 3), (0, 4), (0, 200)], [1, 3, 2]
    drafted, firsts, known = [1, 2, 3], [1, 6, 9], 213
    short = [extents[0], *((extents[i][0], n) for i, n in zip(drafted, held, strict=True))]
    index = [0, *(at + n for at, count in zip(firsts, held, strict=True) for n in range(count))]
    for (dtype, limit), sizes in zip(dtypes(kernel_device), SIZES[kernel_device], strict=False):
        each = [make_heads(sizes, dtype, kernel_device) for _ in range(LAYERS)]
        heads = each[0]
        pool = make_pool(heads, dtype, kernel_device, len(extents))
        batch, owned = make_batch(extents, pool, 3, drafted)
        plain, _ = make_batch(extents, pool.like(pool.num_blocks), 0)
        fewer, _ = make_batch([*short, extents[4]], pool.like(pool.num_blocks), 0)
        channels = 2 * heads.num_keys * heads.key_dim + heads.values
        parts = [channels, channels + heads.values]
        make = lambda *shape, d=dtype: torch.randn(*shape, device=kernel_device).to(d)  # noqa: E731
        whole = make(LAYERS, len(batch.ids), parts[1] + 2 * heads.num_values)
        taps = make(LAYERS, INPUTS, channels)
        later = Later(make(LAYERS, 20, channels), make(LAYERS, 20, 2 * heads.num_values))
        ops, other, expected = kernels_for("cuda"), *(pool.like(pool.num_blocks) for _ in range(2))
        for copy in (other, expected):
            copy.memory.copy_(pool.memory)
        told = make(known, heads.values), make(known, heads.values)
        for layer, (one, of_layer) in enumerate(zip(map(Later, *later), each, strict=True)):
            for kernels, kept, flat, rows in (
                (ops, pool, batch, slice(None)),
                (SPECIFIED, other, plain, slice(known)),
                (SPECIFIED, expected, fewer, [*index, *range(13, known)]),
            ):
                rows, gates, strengths = whole[layer, rows].tensor_split(parts, -1)
                inputs, matrices = kept.sequence_tensors()
                left = (one,) if kept is pool else ()
                mixed = kernels.convolve(rows, taps[layer], inputs, layer, flat, *left)
                behind = of_layer, matrices, layer, flat, *left
                answers = kernels.recall(mixed, gates, strengths, *behind)
                if kept is not expected:
                    told[kept is other].copy_(answers[:known])
            assert relative(*told) < 3 * limit, dtype
        stacked = [torch.stack(part) for part in zip(*(one[4:6] for one in each), strict=True)]
        heads = heads._replace(rate=stacked[0], bias=stacked[1])
        holding = torch.tensor(held, dtype=torch.int32, device=kernel_device)
        held_batch = of_held(batch, firsts, holding)
        ops.replay(later, taps, heads, *pool.sequence_tensors(), held_batch)
        tables = torch.tensor(owned, device=kernel_device).view(len(extents), -1)
        for one, right in zip(pool.sequence_tensors(), expected.sequence_tensors(), strict=True):
            for layer in range(LAYERS):
                assert relative(one.read(layer, tables), right.read(layer, tables)) < 5 * limit


def _check_states(
    pool: KvPool,
    other: KvPool,
    before: KvPool,
    batch: FlatBatch,
    owned: list[int],
    limit: float,
) -> None:
    tables = batch.states[batch.states[:, 0] >= 0].long()
    tensors = (each.sequence_tensors() for each in (pool, other, before))
    for found, expected, was in zip(*tensors, strict=True):
        assert relative(found.read(1, tables), expected.read(1, tables)) < limit
        assert not torch.equal(found.read(1, tables), was.read(1, tables))
        for layer in (0, 2):
            assert torch.equal(found.read(layer, tables), was.read(layer, tables))
    others = [block for block in range(pool.num_blocks) if block not in owned]
    assert others
    assert torch.equal(pool.memory[others], before.memory[others])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(4, 2, 64, 16), (6, 2, 80, 80)])
def test_heads_with_gates(
    heads: int, kv_heads: int, dim: int, turned: int, kernel_device: str
) -> None:
    """Of each head the first numbers turn; queries and gates by turns; gains of full precision."""
    from tests.gpu.kernels.test_kernels import make_pool as make_kv

    ops = kernels_for("cuda")
    for dtype, limit in dtypes(kernel_device):
        make = lambda *shape, d=dtype: torch.randn(*shape, dtype=d, device=kernel_device)  # noqa: E731
        slots = torch.tensor([35, 2, -1, 90, 17], dtype=torch.int32, device=kernel_device)
        qkv, cos, sin = make(5, (2 * heads + 2 * kv_heads) * dim), make(5, turned), make(5, turned)
        norms = make(dim, d=torch.float32), make(dim, d=torch.float32)
        pool, wide = (make_kv(d, kv_heads, dim, kernel_device) for d in (dtype, torch.float64))
        found, expected = (
            kernels.rope_and_store(
                qkv.to(d), tuple(n.to(w) for n in norms), 1e-6, cos.to(d), sin.to(d), slots,
                kv.layer(1), gated=True,
            )
            for kernels, d, w, kv in (
                (ops, dtype, torch.float32, pool), (SPECIFIED, torch.float64, torch.float64, wide)
            )
        )  # fmt: skip
        assert relative(found, expected) < 2 * limit
        assert relative(pool.tensor, wide.tensor) < 2 * limit
        gated = SPECIFIED.gate_heads(expected, qkv.double())
        assert relative(ops.gate_heads(found, qkv), gated) < 3 * limit
        weight = norms[0]
        normed = SPECIFIED.norm(qkv[:, :dim].double(), weight.double(), 1e-6)
        assert relative(ops.norm(qkv[:, :dim].contiguous(), weight, 1e-6), normed) < limit
