"""Keys of attempts and rooms are made in one place, and read in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.keys import RoomKey, attempt_key, is_kv, request_of

NUMBERS = st.integers(0, 2**31 - 1)
KEYS = st.one_of(
    st.builds(RoomKey, st.text(min_size=1), NUMBERS, NUMBERS, NUMBERS),
    st.builds(RoomKey, st.text(min_size=1), NUMBERS, st.none(), st.just(0)),
)


@given(KEYS)
def test_a_room_is_read_as_it_was_made(key: RoomKey) -> None:
    assert RoomKey.of(str(key)) == key
    assert is_kv(str(key)) == (key.item is None)


@given(st.text(min_size=1), NUMBERS)
def test_an_attempt_is_read_as_it_was_made(request_id: str, attempt: int) -> None:
    assert request_of(attempt_key(request_id, attempt)) == request_id


def test_rooms_are_spelled_as_documented() -> None:
    keys = (RoomKey("g-1", 2), RoomKey("g-1", 2, 0), RoomKey("g-1", 2, 3, 1))
    assert [str(key) for key in keys] == ["g-1/2/kv", "g-1/2/0", "g-1/2/3.1"]


@pytest.mark.parametrize("room", ["", "r", "r/1", "r/x/0", "r/1/x", "r/1/0.", "r/1/0.0", "r/01/0"])
def test_what_nobody_made_is_no_room(room: str) -> None:
    assert RoomKey.of(room) is None


ELSEWHERE = re.compile(
    r"""f"\{[\w.]*\}/\{[\w.]*attempt\}["/] | /kv" | (rs|s|rpartition|partition)\w*\("/" """,
    re.VERBOSE,
)
KEYED = (
    "epd/fsm",
    "epd/groups",
    "epd/roles",
    "epd/scheduling",
    "epd_lab/sim",
)  # others split paths


def test_no_other_file_makes_or_reads_one() -> None:
    root = Path(__file__).parents[1]
    files = [file for folder in KEYED for file in (root / folder).rglob("*.py")]
    assert len(files) > 200
    found = [
        f"{file.relative_to(root)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert found == []
