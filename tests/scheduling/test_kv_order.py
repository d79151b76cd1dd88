"""The order of KV on its way: everything once, blocks before the last chunk first, then layers; and
of layers with a window, what is seen from there on and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epd.layouts import KvLayout, RowBlocks, RowKind
from epd.scheduling.kv_order import KvOrder, held_first, moved


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


# --- windows --------------------------------------------------------------------------------------

SIZES = st.sampled_from((1, 2, 4, 8))
KINDS = st.lists(st.tuples(SIZES, st.integers(0, 40)), min_size=1)
ONE_WINDOW = st.tuples(
    st.tuples(SIZES, st.integers(1, 40)), st.lists(st.tuples(SIZES, st.just(0)), max_size=2)
)


def rows_of(*kinds: tuple[int, int]) -> RowBlocks:
    """Each of a layer, by the size of its blocks and its window."""
    each = (
        RowKind(layers=(at,), num_kv_heads=1, head_dim=1, block_size=size, window=window)
        for at, (size, window) in enumerate(kinds)
    )
    return KvLayout(
        num_layers=len(kinds),
        block_size=max(size for size, _ in kinds),
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        block_nbytes=64,
        kinds=tuple(each),
    ).rows


@given(ONE_WINDOW, st.integers(1, 120))
def test_what_moves_is_what_the_next_token_and_later_ones_see(
    kinds: tuple[tuple[int, int], list[tuple[int, int]]], num_tokens: int
) -> None:
    windowed_kind, others = kinds
    rows = rows_of(windowed_kind, *others)
    windowed = {one.column: one for one in rows.windowed}
    seen = []
    for place in range(rows.count(num_tokens)):
        unit, column = divmod(place, len(rows.starts))
        if (one := windowed.get(column)) is None:
            seen.append(place)
            continue
        tokens = range(rows.starts[column], one.stop)
        later = range(num_tokens, num_tokens + 50)
        if any(t < unit * rows.num_tokens + at + one.window for at in tokens for t in later):
            seen.append(place)
    assert list(moved(rows, num_tokens)) == seen


@given(KINDS, st.integers(1, 120), st.integers(1, 120))
def test_what_moves_was_not_passed_before(
    kinds: list[tuple[int, int]], num_tokens: int, num_settled: int
) -> None:
    """So a prompt may give blocks up while others of it are on their way."""
    rows = rows_of(*kinds)
    if num_settled <= num_tokens:
        assert not {*rows.behind(num_settled)} & {*moved(rows, num_tokens)}


@given(KINDS, st.integers(1, 120), st.data())
def test_what_is_held_is_counted_first(
    kinds: list[tuple[int, int]], num_tokens: int, data: st.DataObject
) -> None:
    places = moved(rows_of(*kinds), num_tokens)
    assume(places)  # else none is seen
    held = sorted(data.draw(st.sets(st.sampled_from(list(places)))))
    order = list(held_first(places, [*held, *held, 10**9]))  # whatever a peer says besides
    assert order[: len(held)] == held
    assert order[len(held) :] == [place for place in places if place not in held]


@pytest.mark.parametrize(("block", "window"), [(16, 512), (16, 1024), (4, 96)])
def test_no_more_moves_than_a_window(block: int, window: int) -> None:
    """Of a prompt of any length, in blocks of published sizes."""
    rows = rows_of((block, window), (2 * block, 0))
    for num_tokens in (1, window, *range(8 * window, 8 * window + 2 * block), 32768):
        count = len(moved(rows, num_tokens)) - -(-num_tokens // (2 * block))
        assert (min(num_tokens, window) - 1) <= count * block <= 1.05 * window
