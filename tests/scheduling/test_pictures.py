"""Pictures that no chunk may cut: where a chunk ends, and who waits for room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.layouts import RowBlocks
from epd.roles.steps.pictures import uncut
from epd.scheduling.batching import BatchScheduler, StepBounds
from epd.scheduling.block_pool import BlockPool
from tests.scheduling.entry import Entry, admit

BLOCK = 4


@given(
    pictures=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), max_size=5),
    start=st.integers(0, 60),
    count=st.integers(1, 30),
)
def test_no_chunk_ends_in_a_picture(
    pictures: list[tuple[int, int]], start: int, count: int
) -> None:
    placed, at = [], 0
    for gap, length in pictures:
        placed.append((at + gap, at + gap + length))
        at += gap + length
    found = uncut(start, count, placed)
    assert found > 0
    assert not [p for p in placed if p[0] < start + found < p[1]]
    longest = [n for n in range(1, count + 1) if not any(a < start + n < b for a, b in placed)]
    ahead = [b - start for a, b in placed if a <= start < b]
    assert found == (longest[-1] if longest else ahead[0])


def test_a_picture_waits_for_room_unless_it_is_first() -> None:
    """And the first has it whole, however many decode: no step is larger than its budget."""
    scheduler = BatchScheduler[Entry](
        BlockPool(64),
        RowBlocks(BLOCK),
        StepBounds(15, 8, 16),
        uncut=lambda entry, count: uncut(entry.num_computed, count, [(2, 14)]),
    )
    for key in ("p", "q"):
        scheduler.add(Entry(key, 20))
    assert admit(scheduler) == ["p", "q"]
    p, q = (entry for entry, *_ in scheduler.plan())
    assert [n for _, n, _ in scheduler.plan()] == [2, 2], "up to it"
    p.num_computed = q.num_computed = 2
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("p", 12)], "more than a chunk has"
    for i in range(9):
        scheduler.add_decoding(Entry(f"d{i}", 1, block_table=(40 + i,)))
    step = scheduler.plan()
    assert [n for *_, n, decodes in step if not decodes] == [12]
    assert len(step) == 4, "and three decode, where nine would"
    p.num_computed = 14
    assert [(e.key, n) for e, n, decodes in scheduler.plan() if not decodes] == [("p", 6)], (
        "the rest is too little"
    )
    p.num_computed = 20
    assert [(e.key, n) for e, n, decodes in scheduler.plan() if not decodes] == [("q", 12)]
