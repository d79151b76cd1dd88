"""Sequences that give blocks up behind a window, by the laws of a crowd."""

from __future__ import annotations

import random

import pytest

from epd.scheduling.batching import StepBounds
from tests.scheduling.crowd import Crowd
from tests.scheduling.entry import draw, windows_of


@pytest.mark.parametrize("seed", range(4))
def test_crowds_whose_blocks_go_back_behind_a_window(seed: int) -> None:
    """None has more than its steps see, and everybody ends."""
    rng = random.Random(seed)
    rows, bounds = windows_of((5, 8, 11, 24)[seed]), StepBounds(16, 7, 32, depth=1 + seed // 2)
    crowd = Crowd(draw(rng, 60, 16, rows), 16, bounds, seed % 2 == 0, seed > 1, rows=rows)
    crowd.run()
    assert crowd.num_passed > 20 and crowd.num_preempted
    assert bool(crowd.num_cached) is crowd.caching
