"""Links after kills, between real processes."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.faults.kill_encoders import MAX_WAIT_S, WITHOUT_BACK_OFF, kill_rounds
from tests.e2e.server import serving

pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
def test_no_image_waits_for_its_deadline_when_both_encoders_are_killed() -> None:
    with serving("2e2p2d", program=WITHOUT_BACK_OFF) as server:
        tally = asyncio.run(kill_rounds(server, rounds=8))
    assert tally.rounds == 8
    assert tally.outcomes["200"] >= 8, tally.summary()
    assert set(tally.outcomes) <= {"200", "503"}, tally.summary()
    assert tally.longest_s() < MAX_WAIT_S, tally.summary()
