"""A burst of five times the load, and encoders that an autoscaler adds: when the SLO holds again.

The gateway's own metric is asked, by the query and with the threshold of the ScaledObject that `epd
k8s render` writes, as often as a HorizontalPodAutoscaler asks.  A new encoder serves behind its
load time.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from epd.cli.k8s.operators import scaled_objects
from epd.cli.k8s.pods import ClusterManifests
from epd_lab.bench.servers.figures import Slo
from epd_lab.bench.servers.openai_load import Sample
from epd_lab.bench.workload import FULL_HD, Poisson, Shape, Stream, Workload
from epd_lab.plan import run as planned
from epd_lab.plan.costs import BUNDLED, Costs, read
from epd_lab.plan.run import START_S, ForecastPlan, PlannedCluster, gpu_settings
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.core.guard import no_escape
from epd_lab.sim.world import World

MOST, POLL_S, LOAD_TIME_S = 5, 15.0, 30.0
PER_S, TIMES, USUAL_S, BURST_S = 0.3, 5, 30.0, 140.0
SHAPE = Shape(64, 4, 1, FULL_HD)
SLOWER = 60  # encoders than an H200: so few requests are a load
SLO = Slo(ttft_s=8.0, tpot_s=0.1)
KEPT, WINDOW_S = 0.9, 10.0


def asked_of_prometheus() -> tuple[str, str, float]:
    """Name and stage of the series that are added up, and how much each encoder may have."""
    encoders, _ = scaled_objects(ClusterManifests("epd", "1e1pd", "I"), "http://prometheus", MOST)
    (trigger,) = encoders["spec"]["triggers"]
    of_each = r'sum\(max by \(instance\) \((\w+)\{stage="(\w+)"'
    found = re.match(of_each, trigger["metadata"]["query"])
    assert found is not None and found[1].endswith("_seconds")
    return found[1], found[2], float(trigger["metadata"]["threshold"])


class Scaled(PlannedCluster):
    """Encoders beyond the first are started as the autoscaler asks for them, up to `most`."""

    def __init__(self, world: World, plan: ForecastPlan, most: int) -> None:
        super().__init__(world, plan)
        self.asked, self._most, self._metric = 1, most, asked_of_prometheus()

    def start(self) -> None:
        for name in (GATEWAY, "e0", "pd0"):
            self.world.loop.call_at(0.0, self.spawn, name)
        self.world.loop.call_outside(START_S, self._poll)

    def _poll(self) -> None:
        node, (name, stage, threshold) = self.node(GATEWAY), self._metric
        assert node is not None and node.gateway is not None
        waiting_s = sum(
            metric.value
            for metric in node.gateway.role.metrics()
            if metric.name == name and ("stage", stage) in metric.labels
        )
        wanted = min(self._most, math.ceil(waiting_s / threshold))
        loop = self.world.loop
        for number in range(self.asked, wanted):
            loop.call_outside(loop.now_s + LOAD_TIME_S, self.spawn, f"e{number}")
        self.asked = max(self.asked, wanted)
        loop.call_outside(loop.now_s + POLL_S, self._poll)


def slow_encoders() -> Costs:
    costs = read(BUNDLED)
    points = tuple((patches, ms * SLOWER) for patches, ms in costs.tower.patches_ms)
    tower = replace(costs.tower, patches_ms=points, pair_ns=costs.tower.pair_ns * SLOWER)
    return replace(costs, tower=tower)


def burst(most: int) -> tuple[list[Sample], int]:
    """All requests, and how many encoders were asked for."""
    total_s, more_per_s = USUAL_S + BURST_S, PER_S * (TIMES - 1)
    usual = Stream("usual", SHAPE, Poisson(PER_S), int(PER_S * total_s))
    more = Stream("more", SHAPE, Poisson(more_per_s), int(more_per_s * BURST_S))
    workload = Workload("burst", (usual, more))
    plan = ForecastPlan(slow_encoders(), f"{MOST}e1pd", workload, gpu_settings())
    world = World(0, network=planned.STEADY, max_steps=1 << 62, keep_trace=False, records=False)
    cluster = Scaled(world, plan, most)
    world.loop.describe = cluster.stories
    users = planned._Users(plan, cluster, world.loop)

    async def both() -> list[Sample]:
        clock = world.loop.time
        first = asyncio.ensure_future(planned._all(users, (usual,), 0, clock))
        await asyncio.sleep(USUAL_S)
        (late,), (early,) = await planned._all(users, (more,), 1, clock), await first
        return [*early, *(changed(one, sent_s=one.sent_s + USUAL_S) for one in late)]

    with no_escape():
        cluster.start()
        world.loop.run_until(START_S)
        found = world.loop.run_until_complete(both())
    world.close()
    return found, cluster.asked


def back_after_s(samples: list[Sample]) -> float:
    """From the beginning of the burst until the SLO is kept for good."""
    late_s = 0.0
    for number in range(int((USUAL_S + BURST_S) / WINDOW_S)):
        begin_s = number * WINDOW_S
        window = [s for s in samples if begin_s <= s.sent_s < begin_s + WINDOW_S]
        if sum(map(SLO.kept_by, window)) < KEPT * len(window):
            late_s = begin_s + WINDOW_S - USUAL_S
    return late_s


def test_a_burst_ends_in_the_slo_when_encoders_come() -> None:
    samples, encoders = burst(MOST)
    assert not any(sample.error for sample in samples)
    assert all(SLO.kept_by(sample) for sample in samples if sample.sent_s < USUAL_S)
    back_s = back_after_s(samples)
    print(f"{TIMES} x {PER_S:g} requests/s: {encoders} encoders, in SLO again after {back_s:g} s")
    assert 1 < encoders <= MOST
    assert LOAD_TIME_S < back_s <= BURST_S - 2 * WINDOW_S, "not before they come, and soon after"


@pytest.mark.long
def test_without_more_encoders_it_does_not() -> None:
    samples, _ = burst(1)
    assert back_after_s(samples) == BURST_S
