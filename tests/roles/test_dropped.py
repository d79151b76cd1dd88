"""The log of what was dropped: by kind, type and source, and no more lines than it may have."""

from __future__ import annotations

from typing import Any

from epd.dropped import MAX_SOURCES, SAY_EVERY_S, DropLog


def test_a_flood_costs_a_line_now_and_one_later() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    now_s = 100.0
    drops = DropLog(lambda text, **fields: said.append((text, fields)), lambda: now_s)
    drops.note("malformed Leave", "Leave", "one", "because")
    assert said == [
        (
            "messages were dropped",
            {"what": "1 Leave of 'one': malformed Leave", "last": "because"},
        )
    ]
    for _ in range(1000):
        drops.note("stranger", "Commit", "two")
    for index in range(MAX_SOURCES * 2):
        drops.note("stranger", "Leave", f"s{index}")
    assert len(said) == 1
    now_s += SAY_EVERY_S
    drops.note("malformed", "", "")
    what = said[1][1]["what"]
    assert "1000 Commit of 'two': stranger" in what
    assert f"{MAX_SOURCES + 1} Leave of 'others': stranger" in what
    assert "1 message of 'others': malformed" in what and len(said) == 2
