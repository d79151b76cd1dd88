"""Drills of instances whose heart beats while nothing else of them moves (F87)."""

from __future__ import annotations

from epd.frontend import TimeLimits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

FIRST_DECODE = "REQUEST:WAITING_FOR_REMOTE_KV>DECODING"
LIMITS = TimeLimits(25.0, 25.0, 29.0)
ON_AND_ON = Workload(40, image_share=0.3, max_tokens=24, spread_s=7.0, limits=LIMITS)
STUCK = "INSTANCE:HEALTHY>STUCK"
ENDS = (STUCK, "device_hangs", "device_lost")

# fmt: off
WEDGE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "device-freezes", ("F87", "F15"), topology="1e1p2d", work=ON_AND_ON, fires=ENDS,
        faults=(Fault("hang", "d0", point=FIRST_DECODE, nth=12, duration_s=16.0),),
        mutants=("a_beat_is_progress", "the_stuck_get_work", "the_stuck_live_on"),
    ),
    Drill(
        "vision-thread-freezes", ("F87",), topology="2e1p1d", fires=ENDS,
        work=Workload(30, image_share=1.0, num_images=60, spread_s=7.0, limits=LIMITS),
        faults=(Fault("hang", "e0", point="ENCODING:PREPARED>ENCODING", nth=9, duration_s=16.0),),
        mutants=("a_beat_is_progress", "the_stuck_live_on"),
    ),
    Drill(
        "idle-device-freezes", ("F87",), topology="2e1p1d", fires=ENDS, must_fire=0.9,
        work=Workload(20, image_share=0.0, spread_s=7.0, limits=LIMITS),
        faults=(Fault("hang", "e0", duration_s=16.0),),
        mutants=("a_self_test_without_the_device",),
    ),
    Drill(
        "device-comes-back", ("F87",), topology="1e1p1d", work=ON_AND_ON,
        faults=(Fault("hang", "d0", point=FIRST_DECODE, nth=12, duration_s=4.0),),
        fires=(STUCK, "INSTANCE:STUCK>PROBING", "INSTANCE:PROBING>HEALTHY"),
        mutants=("a_self_test_is_not_answered",),
    ),
    Drill(
        "step-loop-freezes", ("F87",), topology="1e1p2d", work=ON_AND_ON, fires=ENDS,
        faults=(Fault("wedge", "d0", point=FIRST_DECODE, nth=12, duration_s=16.0),),
        mutants=("turns_are_not_looked_at",),
    ),
    Drill(
        "copying-thread-freezes", ("F87",), topology="2e1p1d", fires=ENDS,
        work=Workload(30, image_share=1.0, num_images=60, spread_s=7.0, limits=LIMITS),
        faults=(
            Fault("freeze", "e0", point="OUTGOING:GRANTED>AWAITING_SLOTS", nth=24, duration_s=26.0),
        ),
        may_fail=Excuse(frozenset({"deadline"}), refusals=False),
        why="rows wait at an encoder that answers, until it ends",
        mutants=("writes_are_not_looked_at",),
    ),
    Drill(
        "steps-are-long", ("F87",), topology="1e1p1d", must_fire=0.0,
        work=Workload(6, image_share=0.3, max_tokens=3, spread_s=0.5, limits=LIMITS),
        settings=Settings(
            costs=Costs(step_base_s=0.4, encode_base_s=0.4),
            timing=replace_timing(heartbeat_interval_s=0.05, suspect_after_s=0.16),
        ),
        mutants=("all_have_one_bound", "the_unmeasured_are_stuck"),
    ),
)
# fmt: on
