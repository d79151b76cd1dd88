"""Which rows a rank has of an image, and which of them a step reads from whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.engine.base import RowSpan, SlotRows, part
from epd.groups.device.shared_rows import pieces

SIZES = st.integers(1, 8)


@given(st.integers(0, 40), SIZES)
def test_parts_are_all_there_is_once_and_nearly_equal(total: int, count: int) -> None:
    """Also of fewer things than parts."""
    parts = [part(total, index, count) for index in range(count)]
    assert [i for each in parts for i in each] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert max(map(len, parts)) == -(-total // count)


@st.composite
def spans(draw: st.DrawFn) -> list[RowSpan]:
    """Of several images, each the part of it that a chunk has."""
    found = []
    for image in range(draw(st.integers(1, 4))):
        rows = SlotRows([image], draw(st.integers(1, 30)), is_sharded=True)
        start = draw(st.integers(0, rows.num_rows - 1))
        found.append(RowSpan(0, start, draw(st.integers(1, rows.num_rows - start)), rows))
    return found


@given(spans(), SIZES)
def test_each_wanted_row_is_sent_once_by_who_has_it(wanted: list[RowSpan], size: int) -> None:
    memory: dict[int, tuple[int, int]] = {}  # image and row, by place
    for rank, of_rank in enumerate(pieces(wanted, size)):
        for piece in of_rank:
            for offset, row in enumerate(piece.wanted):
                assert row in piece.rows.held(rank, size)
                assert piece.at + offset not in memory
                memory[piece.at + offset] = piece.rows.slots[0], row
    expected = [(s.rows.slots[0], s.row_start + i) for s in wanted for i in range(s.count)]
    assert [memory[at] for at in range(len(expected))] == expected
    assert len(memory) == len(expected)
