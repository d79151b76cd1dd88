"""Drills of two gateways over the same instances; their clocks are a day apart.

Clients take turns over them, and turn to the other one where theirs is down."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

TWO = Settings(num_gateways=2)
SLOW = Settings(num_gateways=2, costs=Costs(step_base_s=0.02), num_blocks=256)
SLOWER = Settings(num_gateways=2, costs=Costs(step_base_s=0.05), num_blocks=512)
SLOW_TOWER = Settings(num_gateways=2, costs=Costs(encode_base_s=0.8))
SAME_IMAGES = Workload(40, image_share=1.0, num_images=12, spread_s=0.3)
LONG = Workload(24, image_share=0.5, num_images=8, max_tokens=128, spread_s=1.0)
MIXED = Workload(60, image_share=0.6, num_images=8, max_tokens=32, spread_s=6.0)
ITS_OWN = Excuse(frozenset({"gateway"}), refusals=False)
WHY = "a gateway that dies costs its open connections"
RETURNS = "MEMBERSHIP:FORSAKEN>REJOINING"

# fmt: off
GATEWAY_DRILLS: tuple[Drill, ...] = (
    Drill(
        "two-gateways", (), topology="3e1p1d", work=SAME_IMAGES, settings=TWO, must_fire=0.0,
        mutants=("each_gateway_takes_its_own_encoder", "all_gateways_have_one_clock"),
    ),
    Drill(
        "one-of-two-gateways-dies", ("F35",), topology="2e2p2d", work=LONG, settings=SLOWER,
        faults=(Fault("kill", "gateway1"),), may_fail=ITS_OWN, why=WHY,
        fires=("MEMBERSHIP:CUT_OFF>FORSAKEN",), from_s=1.4, to_s=2.4,
        mutants=("what_a_dead_gateway_asked_for_goes_on",),
    ),
    Drill(
        "one-of-two-gateways-returns", ("F35",), topology="2e2p2d", work=MIXED, settings=SLOW,
        faults=(
            Fault("kill", "gateway1", duration_s=3.0),
            Fault("partition", "d0", point=RETURNS, other="gateway1", duration_s=8.0),
        ),
        may_fail=ITS_OWN, why=WHY, fires=(RETURNS,),
    ),
    Drill(
        "one-of-two-gateways-stands-still", ("F35",), topology="2e2p2d", work=SAME_IMAGES,
        settings=SLOW_TOWER, faults=(Fault("stall", "gateway1", duration_s=6.0),),
        fires=(RETURNS,), from_s=1.1, to_s=1.5,
        mutants=("who_was_forsaken_gets_no_answer",),
    ),
    Drill(
        "cut-off-from-one-of-two-gateways", ("F35", "F44"), topology="2e2p2d", work=MIXED,
        settings=SLOW, faults=(Fault("partition", "p0", other="gateway1", duration_s=6.0),),
        fires=("renewed", "INSTANCE:GivenUp"),
        mutants=("a_loss_stays_with_its_registry",),
    ),
    Drill(
        "one-of-two-gateways-does-not-hear", ("F35", "F44"), topology="2e2p2d", work=MIXED,
        settings=SLOW, faults=(Fault("block", "d0", other="gateway1", duration_s=6.0),),
        fires=("renewed", "INSTANCE:GivenUp"),
    ),
    Drill(
        "one-of-two-gateways-is-not-heard", ("F35",), topology="2e2p2d", work=MIXED,
        settings=SLOW, faults=(Fault("block", "gateway1", other="d0", duration_s=4.0),),
        fires=("MEMBERSHIP:CUT_OFF>FORSAKEN",),
    ),
)
# fmt: on
