"""Groups of ranks in the swarm."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest

from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.run import run
from epd_lab.sim.swarm import times
from epd_lab.sim.swarm.plans import draw_plan


@pytest.mark.parametrize("seed", [57003784, 57004534, 57006733, 59000296])
def test_seeds_that_once_failed(seed: int) -> None:
    """SIGTERM while ranks load; a rank that ends while KV is taken in; a group that forms late; a
    question about an attempt that failed, before the next one."""
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


def test_time_outs_are_drawn_and_keep_their_order() -> None:
    """And no two of them are always equal, so that none can stand for another."""
    drawn = [times.draw(KeyedRandom(seed, "times")) for seed in range(200)]
    for timing in drawn:
        assert 2 * timing.heartbeat_interval_s < timing.suspect_after_s < timing.lost_after_s
        assert timing.group_step_timeout_s < timing.stall_timeout_s
    names = [name for name in times.TIMES if len({getattr(t, name) for t in drawn}) > 1]
    assert names == [*times.TIMES]
    for one in names:
        for other in names:
            if one != other:
                assert any(getattr(t, one) != getattr(t, other) for t in drawn), (one, other)
    assert {*msgspec.structs.asdict(drawn[0])} - {*names} == {
        *("first_token_timeout_s", "token_timeout_s", "request_timeout_s"),
        *("topology_timeout_s", "group_join_timeout_s", "max_attempts", "max_clock_skew_s"),
    }


def test_without_it_a_plan_is_what_it_was() -> None:
    before, plan = draw_plan(8, groups=True), draw_plan(8, groups=True, varied=True)
    differ = {f.name for f in fields(plan) if getattr(plan, f.name) != getattr(before, f.name)}
    assert differ <= {"asks", "settings"} and "settings" in differ
