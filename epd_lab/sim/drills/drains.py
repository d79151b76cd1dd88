"""Drills of drains that an operator asks for.

What is open at the bound moves.  Nothing is lost when the gateway dies meanwhile, or when every
instance is restarted, one by one."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

STREAMS = Workload(24, spread_s=0.5, max_tokens=64)
SLOW = Settings(costs=Costs(step_base_s=0.02), num_blocks=256)
LONG = Workload(16, spread_s=0.5, max_tokens=128, image_share=0.3)
SLOWER = Settings(costs=Costs(step_base_s=0.05), num_blocks=512)
SOON = Settings(
    costs=Costs(step_base_s=0.02), num_blocks=256, timing=replace_timing(drain_timeout_s=0.1)
)

# fmt: off
DRAIN_DRILLS: tuple[Drill, ...] = (
    Drill(
        "drain-at-its-bound", ("F55",), topology="1e2pd", work=LONG, settings=SLOWER,
        faults=(Fault("ask_drain", "pd0", duration_s=0.1),), from_s=1.2, to_s=1.6,
        fires=("GENERATION:AttemptRecalled",),
        mutants=("a_recall_forgets_what_was_said", "who_drains_too_long_keeps_its_work"),
    ),
    Drill(
        "drain-while-the-gateway-dies", ("F55",), topology="1e2pd", work=STREAMS, settings=SLOW,
        faults=(
            Fault("ask_drain", "pd0", duration_s=0.4),
            Fault("kill", "gateway", point="INSTANCE:HEALTHY>DRAINING", duration_s=0.3),
        ),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        from_s=1.2, to_s=1.8,
    ),
    Drill(
        "rollout", ("F55",), topology="2e2p2d",
        work=Workload(60, spread_s=7.0, max_tokens=64), settings=SOON,
        faults=(Fault("roll_out", "all", duration_s=0.1, factor=1.2),), from_s=1.2, to_s=1.4,
        fires=("GENERATION:AttemptRecalled",),
        mutants=("a_recall_forgets_what_was_said",),
    ),
)
