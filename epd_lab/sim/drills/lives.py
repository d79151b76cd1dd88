"""Drills of processes that go on as another epoch, with the engines that they have."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.workload import Workload

IMAGES = Workload(7, image_share=1.0, num_images=8, max_images=1, spread_s=0.3)
LONG_WRITES = DataConditions(nbytes_per_s=2e3, jitter_s=3.0)
SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)
FIRST_DECODE = "REQUEST:WAITING_FOR_REMOTE_KV>DECODING"

# fmt: off
LIFE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "a-cut-keeps-the-weights", ("F7", "F44"), topology="2e1p1d", work=IMAGES,
        data=LONG_WRITES,
        faults=(
            Fault(
                "partition", "here", point="OUTGOING:AWAITING_SLOTS>WRITING", nth=4,
                other="gateway", duration_s=2.5,
            ),
        ),
        fires=("renewed", "INSTANCE:SUSPECT>LOST", "INCOMING:QUARANTINED>FAILED"), must_fire=0.5,
        mutants=(
            "a_life_begins_while_the_last_one_writes", "the_lost_are_taken_for_ended",
            "nobody_believes_in_the_end_of_a_life",
        ),
    ),
    Drill(
        "a-stall-keeps-the-weights", ("F7", "F20", "F44"), topology="1e2p1d", data=SLOW_LINK,
        work=Workload(24, max_tokens=24, spread_s=0.3, image_share=0.3),
        settings=Settings(num_landing_blocks=32, near=("p0", "d0")),
        faults=(
            Fault("stall", "p0", duration_s=3.0),
            Fault("stall", "d0", point=FIRST_DECODE, nth=6, duration_s=4.0),
        ),
        fires=("renewed", "INSTANCE:SUSPECT>LOST", "near_write"), must_fire=0.7,
        calm={"settings.num_landing_blocks": 0, "settings.near": ()},
        mutants=("a_life_begins_while_the_last_one_steps",),
    ),
)
# fmt: on
