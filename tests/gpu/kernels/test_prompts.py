"""Prompts that are laid side by side, and what has no room there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.language.flat_batch import chunks_of
from tests.gpu.kernels.test_kernels import (
    LOG2E,
    SPECIFIED,
    fill,
    make_batch,
    make_pool,
    relative,
    sequences_of,
)

EXTENTS = [(40, 1), (33, 5), (0, 70), (100, 65), (140, 40)]


def noted(monkeypatch: pytest.MonkeyPatch, attention: Any) -> list[int]:
    """For each launch for what is not laid, the rows that there are."""
    rests: list[int] = []
    launch = attention.attend_rest

    def attend_rest(*given: Any) -> None:
        rests.append(given[5])
        launch(*given)

    monkeypatch.setattr(attention, "attend_rest", attend_rest)
    return rests


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
