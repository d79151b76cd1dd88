"""What reaches an operator's log, and in which form."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SAY = """
import logging, warnings
from epd.runtime.logs import LoggingLog, set_up_logging
set_up_logging("p0", {level!r}, as_json={as_json})
warnings.warn("for developers", UserWarning)
LoggingLog().warning("request failed", reason='two words, "quoted"\\nand a line', kind="engine")
"""


def said(level: str, *, as_json: bool) -> str:
    command = [sys.executable, "-c", SAY.format(level=level, as_json=as_json)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_warnings_of_libraries_are_for_those_who_debug(*, as_json: bool) -> None:
    assert "for developers" not in said("info", as_json=as_json)
    assert "for developers" in said("debug", as_json=as_json)


def test_a_line_is_one_line() -> None:
    (line,) = said("info", as_json=False).splitlines()
    assert line.endswith(
        r'p0 request failed reason="two words, \"quoted\"\nand a line" kind=engine'
    )
    (line,) = said("info", as_json=True).splitlines()
    assert json.loads(line)["reason"] == 'two words, "quoted"\nand a line'
