"""What a failed run leaves behind can be read, and shows what it is about."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from epd_lab.sim.report import write_report
from epd_lab.sim.run import Plan, run
from epd_lab.sim.runner import Job
from epd_lab.sim.svg import GAP_S, GAP_WIDTH, LEFT, WIDTH, Axis

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Job("drill", "kill-encode", 7).plan()


def test_timeline_shows_every_process_and_the_fault(plan: Plan, tmp_path: Path) -> None:
    image, page, log = write_report(plan, "drill kill-encode 7", tmp_path)
    texts = [node.text or "" for node in ET.parse(image).iter(f"{SVG}text")]
    assert {"gateway", "e0", "e1", "p0", "d0", "slot 0", "kv blocks", "outgoing"} <= set(texts)
    assert any("kill" in text for text in texts)
    assert "OUTGOING" in log.read_text() and "digest" in page.read_text()


def test_every_bar_lies_within_the_image(plan: Plan, tmp_path: Path) -> None:
    image = write_report(plan, "x", tmp_path)[0]
    for node in ET.parse(image).iter(f"{SVG}rect"):
        assert 0 <= float(node.get("x", "0")) <= WIDTH
        assert float(node.get("x", "0")) + float(node.get("width", "0")) <= WIDTH + 1


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


def test_the_axis_cuts_out_silence_and_keeps_the_order() -> None:
    times = [1.0, 1.01, 1.05, 9.0, 9.02]
    axis = Axis(times)
    assert axis.gaps == [(1.05, 9.0)] and GAP_S < 9.0 - 1.05
    places = [axis.x(t) for t in times]
    assert places == sorted(places) and places[0] == LEFT
    assert places[3] - places[2] == pytest.approx(GAP_WIDTH)


def test_many_retries_do_not_fill_the_axis() -> None:
    retries = [at_s for n in range(150) for at_s in (0.2 * n, 0.2 * n + 0.01)]
    axis = Axis(retries)
    assert len(axis.gaps) == 149 and LEFT < axis.x(axis.to_s) <= WIDTH
    assert 149 * axis.gap_width < (WIDTH - LEFT) / 2
