"""Which images a vision batch takes: the oldest prepared ones, whichever thread was faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from epd.engine.base import Patches
from epd.fsm.encoding import BatchStarted, Encoding, PreprocessSucceeded, Requested
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.engine.engines import SimVisionEngine
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.run import Plan, run
from epd_lab.sim.workload import GRIDS, Ask
from epd_lab.sim.world import World

SLOW_DEVICE = Costs(encode_base_s=0.03, preprocess_s=0.004, jitter=3.0, pool_threads=4)


class Watch:
    """Arrivals, what is prepared, and batches, of the one encoder."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.completed: list[str] = []  # by threads
        self.prepared: list[str] = []
        self.batches: list[tuple[list[str], list[str]]] = []  # taken, and left behind
        self._at_s = -1.0

    def prepare(self, world: World, cluster: Cluster) -> None:
        self._world = world
        world.watch(self._see, Requested, PreprocessSucceeded, BatchStarted)

    def _see(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(machine, Encoding)
        if isinstance(event, Requested) and machine.key not in self.arrived:
            self.arrived.append(machine.key)
        elif isinstance(event, PreprocessSucceeded):
            self.completed.append(machine.key)
            self.prepared.append(machine.key)
        elif isinstance(event, BatchStarted):
            self.prepared.remove(machine.key)
            if self._world.loop.now_s != self._at_s:
                self.batches.append(([], self.prepared))
            self._at_s = self._world.loop.now_s
            self.batches[-1][0].append(machine.key)
            self.batches[-1] = (self.batches[-1][0], list(self.prepared))


def test_batches_are_composed_in_order_of_arrival() -> None:
    asks = tuple(
        Ask(n, 1.0, (20, 21), tuple((0, Image(f"{n}/{i}", GRIDS[i])) for i in range(3)))
        for n in range(8)
    )
    watch = Watch()
    result = run(
        Plan(5, "1e1pd", asks, settings=replace(Settings(), costs=SLOW_DEVICE)),
        prepare=watch.prepare,
    )
    assert result.passed, result.violations
    place = {key: n for n, key in enumerate(watch.arrived)}
    assert [place[key] for key in watch.completed] != sorted(place.values()), "threads differ"
    assert max(len(taken) for taken, _ in watch.batches) > 2
    for taken, left in watch.batches:
        places = [place[key] for key in taken]
        assert places == sorted(places)
        assert all(places[-1] < place[key] for key in left), "an older one was passed over"


@pytest.mark.parametrize(("quantum_ms", "most"), [(0.0, 1), (4.0, 2)])
def test_a_batch_is_queued_behind_the_one_under_way(
    quantum_ms: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where batches are cut; a third one is not."""
    asks = tuple(
        Ask(n, 1.0, (20, 21), tuple((0, Image(f"{n}/{i}", GRIDS[i])) for i in range(3)))
        for n in range(8)
    )
    encode, seen = SimVisionEngine.encode, [0]

    async def counted(self: SimVisionEngine, batch: Sequence[Patches]) -> list[Any]:
        seen.append(seen[-1] + 1)
        try:
            return await encode(self, batch)
        finally:
            seen.append(seen[-1] - 1)

    monkeypatch.setattr(SimVisionEngine, "encode", counted)
    engine = msgspec.structs.replace(Settings().engine, max_quantum_ms=quantum_ms)
    result = run(Plan(5, "1e1pd", asks, settings=replace(Settings(), engine=engine)))
    assert result.passed, result.violations
    assert max(seen) == most and seen[-1] == 0
