"""Drills of clients that drive the stages of their requests themselves, and leave between them."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

DRIVEN = Workload(20, max_text=40, drive_share=0.8, spread_s=1.5, num_tenants=2)
SMALL_TIER = msgspec.structs.replace(
    Settings().encode, cache_device_nbytes=1, cache_dir="simulated", cache_disk_nbytes=16384
)
"""What nobody reads goes at once, and is found on the disk again."""

# fmt: off
STAGED_DRILLS: tuple[Drill, ...] = (
    Drill(
        "stage-by-stage", ("F20", "F43", "F56"), topology="2e2p2d",
        work=replace(DRIVEN, broken_share=0.1), fires=("REQUEST:RUNNING>HELD", "prefix_hit"),
        mutants=(
            "an_encode_alone_says_nothing", "a_failed_encode_alone_says_nothing",
            "blocks_are_found_by_their_place",
        ),
        calm={"work.drive_share": 0.0, "work.num_images": 1 << 30},
    ),
    Drill(
        "kept-in-a-small-tier", ("F12", "F31"), topology="2e1p1d",
        work=Workload(16, drive_share=1.0, leave_share=0.2), settings=Settings(encode=SMALL_TIER),
        fires=("ENCODING:RESIDENT>EVICTED",), mutants=("rows_are_stored_when_they_are_gone",),
        calm={"settings.encode.cache_device_nbytes": 1 << 20},
    ),
    Drill(
        "proxy-dies-between-stages", ("F21", "F43"), topology="1e1p1d",
        work=Workload(24, max_text=60, drive_share=1.0, leave_share=0.8, spread_s=1.0),
        settings=Settings(num_blocks=128), fires=("REQUEST:LeaseEnded",),
        mutants=("a_lease_has_no_end", "kept_rooms_stay_open"), calm={"work.leave_share": 0.0},
    ),
    Drill(
        "stages-over-a-lossy-bus", ("F16", "F43"), topology="2e1p1d", work=DRIVEN,
        network=Conditions(loss=0.02, duplication=0.1),
        may_fail=Excuse(frozenset({"lost", "deadline", "unavailable"}), refusals=True),
        why="four attempts can each lose a message that only the next attempt repeats",
        fires=("lost", "duplicated", "REQUEST:RUNNING>HELD"),
        calm={"network": Conditions(), "work.drive_share": 0.0}, mutants=("kept_rooms_stay_open",),
    ),
    Drill(
        "kill-who-holds-a-prompt", ("F19", "F20"), topology="1e2p1d", work=DRIVEN,
        faults=(Fault("kill", "here", point="REQUEST:RUNNING>HELD", nth=6, duration_s=0.4),),
        fires=("GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("a_lost_attempt_is_an_error",),
    ),
)
# fmt: on
