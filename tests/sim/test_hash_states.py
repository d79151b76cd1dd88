"""States of simulated sequences, as the ranks of groups share them."""

from __future__ import annotations

from itertools import product

import pytest

from epd.layouts import blocks_of_runs
from epd_lab.sim.engine.golden import NUM_HEADS, NUM_STATE_BLOCKS, STATE_LAYOUT
from epd_lab.sim.engine.hash_states import MOST_RANKS, layout_of
from epd_lab.sim.swarm.ranks import SIZES

RANKS = range(1, MOST_RANKS + 1)


@pytest.mark.parametrize(("producer", "consumer"), [*product(RANKS, RANKS)])
def test_states_fit_where_they_come(producer: int, consumer: int) -> None:
    """At every rank, in as many blocks as the ranks of a group agree on."""
    theirs = layout_of(0, producer, has_state=True)
    layouts = [layout_of(rank, consumer, has_state=True) for rank in range(consumer)]
    assert len({own.num_state_blocks for own in layouts}) == 1
    for own in layouts:
        assert blocks_of_runs(theirs, own) <= own.num_state_blocks <= NUM_STATE_BLOCKS
        assert own.whole == theirs.whole == STATE_LAYOUT


def test_groups_differ_in_what_the_swarm_draws() -> None:
    """Shares are uneven, and some ranks need more blocks for what comes than for what they have."""
    assert max(SIZES) == MOST_RANKS
    assert all(NUM_HEADS % size for size in RANKS if size > 1)
    assert [layout_of(0, size, has_state=True).num_state_blocks for size in RANKS] == [2, 2, 1]
    assert layout_of(0, 2, has_state=True).state_nbytes(range(4)) <= STATE_LAYOUT.block_nbytes
