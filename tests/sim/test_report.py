"""What a failed run leaves behind can be read, and shows what it is about."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from epd_lab.sim.campaigns.runner import SimJob
from epd_lab.sim.reports.report import write_report
from epd_lab.sim.run import Plan, run


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SimJob("drill", "kill-encode", 7).plan()


def test_timeline_shows_every_process_and_the_fault(plan: Plan, tmp_path: Path) -> None:
    timeline, page, log = write_report(plan, "drill kill-encode 7", tmp_path)
    events = json.loads(timeline.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"gateway", "e0", "e1", "p0", "d0", "slot 0", "KV blocks", "OUTGOING"} <= named
    assert any(event["name"].startswith("kill") for event in events if event["ph"] == "i")
    assert "OUTGOING" in log.read_text() and "digest" in page.read_text()


def test_slices_of_a_track_lie_side_by_side_or_within_each_other(
    plan: Plan, tmp_path: Path
) -> None:
    """Else a viewer draws them wrong; states lie within their machine's life."""
    tracks = defaultdict(list)
    for event in json.loads(write_report(plan, "x", tmp_path)[0].read_text())["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            tracks[event["pid"], event["tid"]].append(span)
    assert len(tracks) > 10
    for spans in tracks.values():
        within: list[float] = []
        for began_us, ended_us in spans:  # in the order in which they are told
            while within and within[-1] <= began_us + 1e-3:
                within.pop()
            assert not within or ended_us <= within[-1] + 1e-3
            within.append(ended_us)


def test_the_sequence_diagram_keeps_to_its_focus(plan: Plan, tmp_path: Path) -> None:
    whole = write_report(plan, "x", tmp_path)[1].read_text()
    room = re.findall(r"gateway-[0-9a-f]{16}/1/0", whole)[-1]
    page = write_report(plan, "x", tmp_path, focus=room)[1].read_text()
    arrows = [line for line in page.splitlines() if "->>" in line]
    assert arrows and all(room in line for line in arrows)
    assert page.count("```") == 2 and ";" not in page


def test_watching_changes_nothing(plan: Plan, tmp_path: Path) -> None:
    page = write_report(plan, "x", tmp_path)[1].read_text()
    assert run(plan).digest in page
