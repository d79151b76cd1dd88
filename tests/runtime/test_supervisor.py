"""What the supervisor makes of a child's lines."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.parametrize("said", [b"", b'{"instance":'])
def test_a_child_whose_supervisor_died_first_ends_without_a_word(said: bytes) -> None:
    command = [sys.executable, "-m", "epd.runtime.child"]
    ended = subprocess.run(command, input=said, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")
