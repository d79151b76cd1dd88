"""Where the bytes of a write go, against a copy byte by byte; what a region keeps, and how long."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epd.messages import RemoteRegion
from epd.transport.base import TransportError
from epd.transport.region import SlotRegion, WriteRefused, check_shape, plan
from tests.fsm.tables import REGION

NUM_SLOTS = 9


def region(slot_nbytes: int) -> RemoteRegion:
    return replace(REGION, slot_nbytes=slot_nbytes, num_slots=NUM_SLOTS)


side_by_side = st.tuples(st.integers(0, NUM_SLOTS), st.integers(0, NUM_SLOTS)).map(
    lambda ends: tuple(range(min(ends), max(ends)))
)
anywhere = st.permutations(range(NUM_SLOTS)).flatmap(
    lambda slots: st.integers(0, NUM_SLOTS).map(lambda count: tuple(slots[:count]))
)
neighbours = side_by_side.flatmap(st.permutations).map(tuple)


@pytest.mark.parametrize("places", [side_by_side, neighbours, anywhere])
@given(data=st.data(), slot_nbytes=st.integers(1, 5))
def test_every_byte_goes_where_its_slot_is(
    places: st.SearchStrategy[tuple[int, ...]], data: st.DataObject, slot_nbytes: int
) -> None:
    slots = data.draw(places)
    room = len(slots) * slot_nbytes
    nbytes = room - data.draw(st.integers(0, min(room, 2 * slot_nbytes)))
    content = bytes(range(1, nbytes + 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=4)))
    bounds = [0, *cuts, nbytes]
    source = [memoryview(content)[a:b] for a, b in pairwise(bounds) if a < b]
    wanted = bytearray(NUM_SLOTS * slot_nbytes)
    for at, byte in enumerate(content):
        wanted[slots[at // slot_nbytes] * slot_nbytes + at % slot_nbytes] = byte
    found = bytearray(len(wanted))
    pieces = plan(source, region(slot_nbytes), slots)
    for offset, view in pieces:
        found[offset : offset + view.nbytes] = view
    assert found == wanted
    assert sum(view.nbytes for _, view in pieces) == nbytes
    if all(after == slot + 1 for slot, after in pairwise(slots)):
        assert len(pieces) == len(source), "side by side, a piece for each buffer"


@given(side_by_side.filter(bool) | anywhere.filter(bool), st.integers(0, NUM_SLOTS))
def test_no_slot_is_written_twice(slots: tuple[int, ...], place: int) -> None:
    twice = (*slots[:place], slots[0], *slots[place:])
    with pytest.raises(WriteRefused, match="named twice"):
        plan([memoryview(b"a")], region(1), twice)


@pytest.mark.parametrize(
    "slots", [(-1,), (-1, 0, 1), (NUM_SLOTS,), (NUM_SLOTS - 1, NUM_SLOTS), (0, NUM_SLOTS, 3)]
)
def test_no_slot_is_outside(slots: tuple[int, ...]) -> None:
    with pytest.raises(WriteRefused, match="is not one of the region's 9"):
        plan([memoryview(b"a")], region(1), slots)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(WriteRefused, match="7 bytes do not fit 2 slots of 3 bytes"):
        plan([memoryview(b"abcdefg")], region(3), (4, 5))


@pytest.mark.parametrize(("num_slots", "slot_nbytes"), [(0, 1), (1, 0), (-1, 8), (8, -1)])
def test_an_empty_region_is_refused(num_slots: int, slot_nbytes: int) -> None:
    with pytest.raises(TransportError, match=f"{num_slots} slots of {slot_nbytes} bytes"):
        check_shape("rows", num_slots, slot_nbytes)


def test_more_than_slots_hold_or_were_given_is_not_there() -> None:
    own = SlotRegion(region(2), memoryview(bytearray(2 * NUM_SLOTS)), by_reference=True)
    with pytest.raises(WriteRefused, match="5 bytes asked of 2 slots"):
        own.views((3, 4), 5)
    assert b"".join(own.views((3, 4), 3)) == bytes(3)
    own.deposit((3, 4), [memoryview(b"abc")])
    assert b"".join(own.views((3, 4), 3)) == b"abc"
    with pytest.raises(WriteRefused, match="fewer than 4 bytes were deposited"):
        own.views((3, 4), 4)


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_revoked_region_keeps_nothing(by_reference: bool) -> None:
    memory, given = bytearray(NUM_SLOTS), bytearray(b"ab")
    own = SlotRegion(region(1), memoryview(memory), by_reference=by_reference)
    own.deposit((3, 4), [memoryview(given)])
    own.release()
    memory.extend(b"!")  # raises while there is a view of it
    given.extend(b"!")
