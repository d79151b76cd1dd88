"""A device that stands still once is not shunned for it.

Placement counts with what instances measure of themselves.  On four GPUs three drivers stood still
for more than a second, in one of them during a step.  That one step made all steps of its instance
look four times as long, and for two minutes nothing was placed there: nothing by which it could
have measured itself anew.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from epd.scheduling import step_cost
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import Ask
from tests.sim.test_isolation import EXACT, ROOMY, play, text

PER_S = 20
HUNG_AT_S, HUNG_FOR_S, AFTER_S, UNTIL_S = 2.0, 1.3, 6.0, 9.0
SETTINGS = replace(ROOMY, costs=replace(EXACT, step_base_s=0.004))


def asks() -> list[Ask]:
    """Twenty a second, of 80 steps each: about seven are open at a time."""
    count = int(PER_S * (UNTIL_S - 1.0))
    return [
        Ask(n, 1.0 + n / PER_S, text(20, n), max_tokens=80, stops_at_eos=False)
        for n in range(count)
    ]


def share_of_steps(monkeypatch: pytest.MonkeyPatch) -> float:
    """The part that the one which hung for a while has, of all steps from some seconds later on."""
    seen: Counter[str] = Counter()
    launch = SimDevice.run

    def counted(self: SimDevice, *args: object, call: str, **more: object) -> object:
        if call == "step" and self._loop.now_s > AFTER_S:
            seen[self.process.instance_id] += 1
        return launch(self, *args, call=call, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SimDevice, "run", counted)
    hangs = Fault("hang", "epd1", at_s=HUNG_AT_S, duration_s=HUNG_FOR_S)
    play("2epd", asks(), SETTINGS, (hangs,))
    assert sum(seen.values()) > 700, "one alone has 750 steps of 4 ms"
    return seen["epd1"] / sum(seen.values())


@pytest.mark.parametrize(
    ("stall", "recent_s", "is_shunned"),
    [
        (step_cost.STALL, step_cost.RECENT_S, False),
        # It is believed to be slow, but not for long; for ever, or this test would show nothing.
        pytest.param(math.inf, 2.0, False, marks=pytest.mark.long),
        pytest.param(math.inf, math.inf, True, marks=pytest.mark.long),
    ],
)
def test_who_hung_for_a_second_has_its_share_again(
    stall: float, recent_s: float, is_shunned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cost, "STALL", stall)
    monkeypatch.setattr(step_cost, "RECENT_S", recent_s)
    share = share_of_steps(monkeypatch)
    assert share < 0.1 if is_shunned else share > 0.3, share
