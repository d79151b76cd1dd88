"""What operators do, loops and devices that stand still, and second gateways in the swarm."""

from __future__ import annotations

from dataclasses import fields

import pytest

from epd_lab.sim.run import run
from epd_lab.sim.swarm import operations
from epd_lab.sim.swarm.plans import draw_plan

SEEDS = range(200)


def test_without_them_a_plan_is_what_it_was() -> None:
    for seed in range(40):
        before = draw_plan(seed, groups=True, varied=True)
        plan = draw_plan(seed, groups=True, varied=True, operated=True)
        assert plan.faults[: len(before.faults)] == before.faults
        differ = {f.name for f in fields(plan) if getattr(plan, f.name) != getattr(before, f.name)}
        assert differ <= {"faults", "settings", "may_fail"}


def test_all_of_them_are_drawn_and_nobody_else_loses_the_last_of_a_role() -> None:
    plans = [draw_plan(seed, operated=True) for seed in SEEDS]
    added = [f for seed, p in zip(SEEDS, plans, strict=True)
             for f in p.faults[len(draw_plan(seed).faults):]]  # fmt: skip
    asked = [f for f in added if f.kind == "ask_drain"]
    assert {f.kind for f in added} >= {*operations.KINDS, *operations.CUTS}
    assert {f.call for f in asked} == {"", operations.ALL, "encode", "prefill,decode"}
    two = [p for p in plans if p.settings.num_gateways == 2]
    assert 0.2 < len(two) / len(plans) < 0.4
    for plan in plans:
        for fault in plan.faults:
            if fault.kind == "ask_drain" and plan.topology in ("1epd", "1e1pd", "1e1p1d"):
                assert fault.call in ("", operations.ALL)


@pytest.mark.parametrize("seed", [770007, 770064])
def test_seeds_that_once_failed(seed: int) -> None:
    """A step loop that takes no turns is not one that was not woken."""
    plan = draw_plan(seed, groups=True, varied=True, operated=True)
    assert any(fault.kind in ("wedge", "hang") for fault in plan.faults)
    assert run(plan).violations == []
