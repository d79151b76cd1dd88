"""What a request costs where nothing goes wrong is what docs/happy_path.md says, and no more."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from epd_lab.sim.campaigns.counts import BY_TIME, Counts, count

TOLD = (Path(__file__).parents[3] / "docs" / "happy_path.md").read_text(encoding="utf-8")
PLACES = {"encode": "e", "prefill": "p", "decode": "d", "gateway": "gateway"}
SELDOM = 0.02  # a request: what happens now and then, and is another document's


@pytest.fixture(scope="module")
def counts() -> Counts:
    return count()


def told(what: str) -> float:
    found = re.search(rf"^\| ([\d.]+) {what}", TOLD, re.MULTILINE)
    assert found is not None, what
    return float(found[1])


def test_a_request_takes_what_is_told(counts: Counts) -> None:
    found = counts.told()
    for name, what in (
        ("steps", "steps"),
        ("messages", "messages"),
        ("transitions", "transitions"),
        ("timers", "timers armed"),
    ):
        assert found[name] == pytest.approx(told(what), rel=0.03), name


def test_every_message_on_the_way_is_told(counts: Counts) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+), (\w+) \| ([\d.]+)", TOLD, re.MULTILINE)
    written = {(w, PLACES[a], PLACES[b]): float(n) for w, a, b, n in rows}
    often = {
        way: n / counts.num_requests
        for way, n in counts.messages.items()
        if way[0] not in BY_TIME and n > SELDOM * counts.num_requests
    }
    assert often.keys() == written.keys()
    for way, n in often.items():
        assert n == pytest.approx(written[way], abs=0.06, rel=0.05), way


def test_the_transitions_of_every_machine_are_told(counts: Counts) -> None:
    rows = re.findall(r"^\| ([A-Z]+)[^|]* \| ([\d.]+)", TOLD, re.MULTILINE)
    found: Counter[str] = Counter()
    for (machine, *_), n in counts.edges.items():
        found[machine] += n
    assert found.keys() == {machine for machine, _ in rows}
    for machine, n in rows:
        assert found[machine] / counts.num_requests == pytest.approx(float(n), rel=0.05), machine
