"""What the supervisor makes of a child's lines."""

from __future__ import annotations

import pytest

from epd.runtime.supervisor import _read_status


def test_a_status_line_is_read() -> None:
    status = _read_status(b'{"state":"serving","detail":"http://h:1"}\n')
    assert status is not None
    assert (status.state, status.detail) == ("serving", "http://h:1")


@pytest.mark.parametrize(
    "line", [b"hello from a library\n", b"{}\n", b"\xff\xfe\n", b"[1]\n", b"\n"]
)
def test_other_lines_are_not_taken_for_one(line: bytes) -> None:
    assert _read_status(line) is None
