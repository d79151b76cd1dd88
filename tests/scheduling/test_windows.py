"""Sequences that give blocks up behind a window, by the laws of a crowd."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from epd.layouts import RowKind
from epd.scheduling.backlog import Backlog
from epd.scheduling.batching import StepBounds
from epd.scheduling.placement import Needs
from tests.scheduling.crowd import Crowd
from tests.scheduling.entry import draw, windows_of
from tests.scheduling.test_predicted_rule import GPU, LAYOUT, chosen, instance


@pytest.mark.parametrize("seed", range(4))
def test_crowds_whose_blocks_go_back_behind_a_window(seed: int) -> None:
    """None has more than its steps see, and everybody ends."""
    rng = random.Random(seed)
    rows, bounds = windows_of((5, 8, 11, 24)[seed]), StepBounds(16, 7, 32, depth=1 + seed // 2)
    crowd = Crowd(draw(rng, 60, 16, rows), 16, bounds, seed % 2 == 0, seed > 1, rows=rows)
    crowd.run()
    assert crowd.num_passed > 20 and crowd.num_preempted
    assert bool(crowd.num_cached) is crowd.caching


def test_a_prompt_moves_more_readily_where_its_windows_alone_do() -> None:
    """A busy instance keeps the answer of a long prompt, unless little of it has to move."""
    slow = replace(GPU, nbyte_s=1e-10)
    busy = Backlog(num_sequences=40, num_decoding=40)
    asked = Needs([], num_tokens=32768, max_tokens=64)
    kinds = tuple(
        RowKind(layers=tuple(layers), num_kv_heads=8, head_dim=128, window=window, block_size=size)
        for layers, window, size in ((range(32), 512, 16), (range(32, 36), 0, 128))
    )
    mixed = replace(LAYOUT, kinds=kinds, block_size=128, block_nbytes=32 * 16 * 4096)
    for layout, where in (LAYOUT, "epd0"), (mixed, "d0"):
        pool = [instance("epd0", busy, slow), instance("d0", costs=slow)]
        for one in pool:
            one.info = replace(one.info, kv_layout=layout)
        assert chosen(pool, asked)[2] == where
