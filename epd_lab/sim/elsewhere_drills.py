"""Drills of images that their encoders fail, and that other encoders take within the attempt."""

from __future__ import annotations

from epd_lab.sim.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.transfer import DataConditions
from epd_lab.sim.workload import Workload

FOUR_IMAGES = Workload(num_requests=6, image_share=1.0, num_images=16, spread_s=0.3)
SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)

ELSEWHERE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "encode-dies-between-images",
        ("F19", "F59"),
        topology="2e1p1d",
        work=FOUR_IMAGES,
        data=SLOW_LINK,
        faults=(Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=0.4),),
        fires=("GENERATION:ImageMoved", "EMBEDDING:AWAITING_ROOM>REQUESTED"),
        mutants=(
            "a_lost_encoder_ends_the_attempt",
            "all_images_of_the_lost_are_encoded_again",
            "the_lost_is_asked_again",
        ),
    ),
    Drill(
        "no-room-is-told",
        ("F19", "F59"),
        topology="2e1p1d",
        work=FOUR_IMAGES,
        data=SLOW_LINK,
        faults=(
            Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=0.4),
            Fault("mute", "gateway", point="EMBEDDING:LOADING>AWAITING_ROOM", nth=1, other="p0"),
        ),
        fires=("GENERATION:ImageMoved", "EMBEDDING:NoRoomCame"),
        mutants=("another_room_is_waited_for",),
    ),
)
