"""Groups of ranks in the swarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd_lab.sim.run import run
from epd_lab.sim.swarm import draw_plan


@pytest.mark.parametrize("seed", [57003784, 57004534, 57006733, 59000296])
def test_seeds_that_once_failed(seed: int) -> None:
    """SIGTERM while ranks load; a rank that ends while KV is taken in; a group that forms late; a
    question about an attempt that failed, before the next one.  Another is in `NOTICED`, with what
    made it fail."""
    plan = draw_plan(seed, groups=True)
    assert ":tp" in plan.topology
    assert run(plan).violations == []


def test_without_groups_a_plan_is_what_it_was() -> None:
    """But for what says that there are groups: the work, and the other faults."""
    seed = 57003784
    before, plan = draw_plan(seed), draw_plan(seed, groups=True)
    assert before.topology == "1epd" and len(plan.faults) == len(before.faults) + 1
    same = {name: getattr(before, name) for name in ("topology", "faults", "settings", "may_fail")}
    assert replace(plan, **same) == before


def test_groups_hand_states_over() -> None:
    """Between sizes that differ, where a family has states."""
    plan = draw_plan(75000063, groups=True)
    assert plan.topology == "1e1p:tp2,2d:tp3" and plan.settings.has_state
    result = run(plan)
    assert result.violations == []
    assert result.fired["state_came_by_heads"]
