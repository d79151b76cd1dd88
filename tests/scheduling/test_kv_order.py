"""The order of KV on its way: everything once, blocks before the last chunk first, then layers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.kv_order import KvOrder


def test_blocks_then_layers() -> None:
    order = KvOrder(num_held=1, num_whole=2, num_blocks=4, slots_per_block=2)
    assert order.places(0, order.num_slots) == [2, 3, 4, 6, 5, 7]
    assert [order.num_ready(groups) for groups in range(3)] == [2, 4, 6]


def test_a_state_comes_last() -> None:
    order = KvOrder(num_held=1, num_whole=2, num_blocks=3, slots_per_block=2, num_state_blocks=2)
    assert order.places(0, order.num_slots) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert order.num_ready(2) == 4, "before the last token it is not final"


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(1, 4), st.integers(0, 3))
def test_everything_is_sent_once(counts: list[int], slots_per_block: int, state: int) -> None:
    held, whole, blocks = sorted(counts)
    order = KvOrder(held, whole, blocks, slots_per_block, state)
    places = order.places(0, order.num_slots)
    end = (blocks + state) * slots_per_block
    assert sorted(places) == list(range(held * slots_per_block, end))
    for groups in range(slots_per_block + 1):
        ready = places[: order.num_ready(groups)]
        assert all(p // slots_per_block < whole or p % slots_per_block < groups for p in ready)
    assert order.num_ready(slots_per_block) == order.num_slots - state * slots_per_block
