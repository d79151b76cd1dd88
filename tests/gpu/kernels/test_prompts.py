"""Prompts that are laid side by side: the rows, what has no room, and pages for the library."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import FP8
from epd.engine.language.flat_batch import chunks_of
from tests.gpu.kernels.test_kernels import (
    LOG2E,
    SPECIFIED,
    fill,
    fill_eight_bits,
    make_batch,
    make_pool,
    relative,
    sequences_of,
)

EXTENTS = [(40, 1), (33, 5), (0, 70), (100, 65), (140, 40)]


def of_library(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    seqused_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor]:
    """What the library is asked for: nothing but the pages that a sequence has keys in."""
    out = torch.full_like(query, torch.nan)
    bounds = itertools.pairwise(cu_seqlens_q.tolist())
    for number, ((begin, end), length) in enumerate(zip(bounds, seqused_k.tolist(), strict=True)):
        count = end - begin if seqused_q is None else int(seqused_q[number])
        if not count:
            continue
        assert count == end - begin
        pages = page_table[number, : -(-length // keys.shape[1])].long()
        key, value = (part[pages].flatten(0, 1)[:length].transpose(0, 1) for part in (keys, values))
        last = torch.arange(length - count, length, device=query.device)
        out[begin:end] = scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=torch.arange(length, device=query.device)[None] <= last[:, None],
            scale=softmax_scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return (out,)


def noted(monkeypatch: pytest.MonkeyPatch, attention: Any) -> list[int]:
    """For each launch for what is not laid, the rows that there are."""
    rests: list[int] = []
    launch = attention.attend_rest

    def attend_rest(*given: Any) -> None:
        rests.append(given[5])
        launch(*given)

    monkeypatch.setattr(attention, "attend_rest", attend_rest)
    return rests


@pytest.mark.parametrize(("rows", "num_laid"), [(4096, 4), (384, 2), (128, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, FP8])
def test_the_library_is_given_pages(
    rows: int,
    num_laid: int,
    dtype: torch.dtype,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of the pool in 16 bits; of eight bits what is laid, and the rest goes through Triton.
    The host knows when there is no rest."""
    from epd.engine.kernels import triton_attention, triton_prompts
    from epd.engine.kernels.fast import prompts

    library = ModuleType("flash_attn.cute")
    library.flash_attn_varlen_func = of_library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", library)
    monkeypatch.setattr(triton_prompts, "MAX_NBYTES", 2 * rows * 2 * 64 * 2)
    rests = noted(monkeypatch, triton_attention)
    extents = EXTENTS[1:]  # the interpreter has no assembly: no decodes of eight bits
    batch, num_blocks = make_batch(extents, kernel_device, 32)
    pool = make_pool(dtype, 2, 64, kernel_device, num_blocks)
    wide = pool
    if dtype == FP8:
        fill_eight_bits(pool, batch)
    else:
        wide = make_pool(torch.float64, 2, 64, kernel_device, num_blocks)
        fill(pool, wide, batch)
    query = torch.randn(len(batch.ids), 4, 64, dtype=torch.float16, device=kernel_device)
    found = prompts.attend(query, pool.layer(1), batch, 0.125)
    expected = SPECIFIED.attend(query.double(), wide.layer(1), batch, 0.125)
    assert relative(found, expected) < 2e-3
    assert rests == ([rows] if dtype == FP8 and num_laid < len(extents) else [])


def test_prompts_that_find_no_room_are_read_in_their_blocks(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for all prompts of a step, for the first of them, and for none give the same."""
    from epd.engine.kernels import triton_prompts

    ops, dtype = kernels_for("cuda"), torch.float16
    batch, num_blocks = make_batch(EXTENTS, kernel_device, 32)
    pool = make_pool(dtype, 2, 64, kernel_device, num_blocks)
    pool.tensor.fill_(torch.nan)
    wide = make_pool(torch.float64, 2, 64, kernel_device, num_blocks)
    fill(pool, wide, batch)
    query = torch.randn(len(batch.ids), 4, 64, dtype=dtype, device=kernel_device)
    expected = SPECIFIED.attend(query.double(), wide.layer(1), batch, 0.125)
    found = []
    for rows in (4096, 384, 128):
        monkeypatch.setattr(triton_prompts, "MAX_NBYTES", 2 * rows * 2 * 64 * dtype.itemsize)
        out = torch.full_like(query, torch.nan)
        laid = triton_prompts.lay(query, pool.layer(1), batch, 32)
        triton_prompts.attend_laid(query, laid.rows, pool.layer(1), batch, 0.125 * LOG2E, out)
        found.append(int(out.isfinite().all(-1).all(-1).sum()))
        assert relative(ops.attend(query, pool.layer(1), batch, 0.125), expected) < 1e-3
    assert found == [70 + 65 + 40, 70, 0]


@pytest.mark.parametrize(
    ("extents", "num_rests"), [([(0, 70), (9, 33)], 0), ([(0, 70), (9, 5)], 1)]
)
def test_nothing_is_launched_for_no_prompt(
    extents: list[tuple[int, int]],
    num_rests: int,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host has the lengths of a step that was not captured."""
    from epd.engine.kernels import triton_attention

    batch, num_blocks = make_batch(extents, kernel_device, 32)
    batch = replace(batch, chunks=chunks_of(sequences_of(extents)[0]))
    pool = make_pool(torch.float16, 2, 64, kernel_device, num_blocks)
    wide = make_pool(torch.float64, 2, 64, kernel_device, num_blocks)
    fill(pool, wide, batch)
    query = torch.randn(len(batch.ids), 4, 64, dtype=torch.float16, device=kernel_device)
    rests = noted(monkeypatch, triton_attention)
    found = triton_attention.attend(query, pool.layer(1), batch, 0.125)
    assert relative(found, SPECIFIED.attend(query.double(), wide.layer(1), batch, 0.125)) < 1e-3
    assert len(rests) == num_rests
