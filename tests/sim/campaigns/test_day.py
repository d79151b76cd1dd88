"""Hours in the default configuration: checked as drills are, and what is kept does not grow."""

from __future__ import annotations

import json

import pytest

from epd.fsm import instance
from epd_lab.sim.campaigns import bench, day
from epd_lab.sim.cluster import Cluster
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.workload import Workload
from epd_lab.sim.world import World


def test_an_hour_is_served_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "HOUR_S", 60)
    lived = day.live_through(2, quiet=True)
    asks = [day._ask(KeyedRandom(0, "day"), second) for second in range(120)]
    assert lived.violations == ()
    assert lived.num_requests == 120
    assert lived.num_tokens == sum(len(ask.answer()) for ask in asks)
    assert any(ask.images for ask in asks) and not all(ask.images for ask in asks)


@pytest.mark.long
def test_half_an_hour_at_full_load_raises_no_alarm() -> None:
    """Nobody is taken for stuck; see `Wedges`.  All instances work nearly all of the time."""
    devices: dict[str, list[SimDevice]] = {}

    def prepare(world: World, cluster: Cluster) -> None:
        world.watch(
            lambda *_: devices.update(
                {n: list(one.devices) for n, one in cluster.nodes.items() if one.instance}
            ),
            instance.JoinAccepted,
        )

    lived = day.live_through(1, hour_s=1800, quiet=True, settings=day.FULL, prepare=prepare)
    assert lived.violations == ()
    busy = {name: max(one.busy_s for one in them) / 1800 for name, them in devices.items()}
    assert len(busy) == 3 and min(busy.values()) > 0.8, busy


@pytest.mark.long
def test_a_day_that_breaks_an_invariant_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(day, "HOUR_S", 20)
    monkeypatch.setattr(day, "MIX", Workload(broken_share=1.0))  # nothing may fail in a day
    monkeypatch.setattr(bench, "measure", lambda: bench.Speed(1.0, 1.0))
    assert bench.run_bench(1, 1, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["day"]["violations"] > 0 and told["runs_per_s"] == 1.0
