"""States between ranks that share heads in other ways: each has its own heads in the end, bit by
bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from epd.engine.adapter import ModelAdapter, adapter_for
from epd.groups.device.state_moves import put_states, take_states
from epd.model_files.checkpoint import read_checkpoint
from epd.shares import cells, runs
from tests.engine.language.states import (
    assert_equal,
    cut_from,
    drawn,
    pool_of,
    rank_of,
    read,
    write,
)

UNIT_NBYTES = 64


@pytest.fixture(scope="module")
def adapter(model_dir: Callable[[str], Path]) -> ModelAdapter:
    return adapter_for(read_checkpoint(model_dir("qwen3_5")))


@pytest.mark.parametrize(("num_keys", "num_values"), [(2, 4), (3, 6), (1, 4), (4, 4)])
def test_each_rank_has_its_own_heads_in_the_end(
    num_keys: int, num_values: int, adapter: ModelAdapter
) -> None:
    text = adapter.text_config
    text.linear_num_key_heads, text.linear_num_value_heads = num_keys, num_values
    whole = drawn(adapter)
    for p, c in product((1, 2, 3, 4), (1, 2, 3, 4)):
        sources = [pool_of(adapter, rank_of(rank, p)) for rank in range(p)]
        for rank, source in enumerate(sources):
            mine = cut_from(whole, adapter, rank_of(rank, p))
            write(source, range(source.num_blocks)[::-1], mine)  # so that places count
        for rank in range(c):
            pool = pool_of(adapter, rank_of(rank, c))
            layout = pool.layout
            assert layout.whole == sources[0].layout.whole
            found = cells(sources[0].layout.state_shares, layout.state_shares)
            to_it = [cell for cell in found if cell.consumer == rank]
            share = layout.state_shares[rank]
            own = [share[cell.target.start : cell.target.stop] for cell in to_it]
            places = runs([layout.state_nbytes(heads) for heads in own], UNIT_NBYTES)
            starts = [place.start * UNIT_NBYTES for place in places]
            landed = torch.full((places[-1].stop * UNIT_NBYTES,), 255, dtype=torch.uint8)
            for cell, start in zip(to_it, starts, strict=True):
                source = sources[cell.producer]
                blocks = torch.arange(source.num_blocks).flip(0)
                taken = take_states(source, blocks, cell.source)
                landed[start:][: taken.numel()] = taken
            pieces = [(cell.target, start) for cell, start in zip(to_it, starts, strict=True)]
            put_states(pool, torch.arange(pool.num_blocks), landed, pieces)
            expected = cut_from(whole, adapter, rank_of(rank, c))
            assert_equal(read(pool, range(pool.num_blocks)), expected)
