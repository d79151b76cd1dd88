"""Drills of images that their encoders fail, and that other encoders take within the attempt."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.workload import Workload

FOUR_IMAGES = Workload(num_requests=6, image_share=1.0, num_images=16, spread_s=0.3)
FEW_IMAGES = Workload(num_requests=24, image_share=1.0, num_images=3, spread_s=0.05)
SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)
MANY_IMAGES = Workload(num_requests=32, image_share=1.0, num_images=64, spread_s=1.2)
AT_ONCE = Workload(num_requests=40, image_share=1.0, num_images=64, spread_s=0.6)
HURRIED = Workload(40, image_share=1.0, num_images=64, spread_s=1.2, cancel_share=0.7)
EAGER = Settings(
    prefill=msgspec.structs.replace(
        Settings().prefill,
        pool_nbytes=8 * Settings().prefill.pool_nbytes,
        hedge_after_s=0.15,
        min_measured_loads=3,
    )
)
"""Few loads are measured, and room is made for a second one of each image."""

# fmt: off
ELSEWHERE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "encode-dies-between-images", ("F19", "F59"), topology="2e1p1d", work=FOUR_IMAGES,
        data=SLOW_LINK,
        faults=(Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=0.4),),
        fires=("GENERATION:ImageMoved", "EMBEDDING:AWAITING_ROOM>REQUESTED"),
        mutants=(
            "a_lost_encoder_ends_the_attempt", "all_images_of_the_lost_are_encoded_again",
            "the_lost_is_asked_again",
        ),
    ),
    Drill(
        "no-room-is-told", ("F19", "F59"), topology="2e1p1d", work=FOUR_IMAGES, data=SLOW_LINK,
        faults=(
            Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=0.4),
            Fault("mute", "gateway", point="EMBEDDING:LOADING>AWAITING_ROOM", nth=1, other="p0"),
        ),
        fires=("GENERATION:ImageMoved", "EMBEDDING:NoRoomCame"),
        mutants=("another_room_is_waited_for",),
    ),
    Drill(
        "the-room-is-told-again", ("F19", "F59"), topology="2e1p1d", work=FOUR_IMAGES,
        data=SLOW_LINK,
        faults=(
            Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=0.4),
            Fault("reset", "here", point="MESSAGE:RoomAdded", nth=2, other="peer"),
        ),
        fires=("GENERATION:ImageMoved", "EMBEDDING:RetryDue"),
        mutants=("a_room_is_asked_for_once", "a_room_is_told_once"),
    ),
    Drill(
        "no-encoder-and-no-abort", ("F42", "F59"), work=FOUR_IMAGES, data=SLOW_LINK,
        faults=(
            Fault("kill", "e0", point="EMBEDDING:LOADING>RESIDENT", nth=3, duration_s=4.0),
            Fault("reset", "here", point="MESSAGE:AbortRequest", nth=1, other="peer"),
        ),
        fires=("GENERATION:MIGRATING>AWAITING_TOPOLOGY",),
        mutants=("what_was_given_up_is_served_until_the_next",),
    ),
    Drill(
        "an-image-is-at-hand-elsewhere", ("F19", "F59", "F68"), topology="2e2p1d", work=FEW_IMAGES,
        settings=Settings(costs=Costs(preprocess_s=0.1)),
        faults=(
            Fault("kill", "e0", point="ENCODING:PREPARED>ENCODING", nth=2, duration_s=0.05),
            Fault("stall", "p1", point="INSTANCE:EpochReplaced", nth=1, duration_s=0.05),
        ),
        fires=("GENERATION:ImageMoved",), mutants=("who_has_it_at_hand_may_not_take_it",),
    ),
    Drill(
        "encode-is-late", ("F62",), topology="2e1p1d", work=MANY_IMAGES, settings=EAGER,
        faults=(Fault("slow", "e0", duration_s=2.0, factor=30.0),),
        fires=("EMBEDDING:LOADING>HEDGED", "hedges_won"),
        mutants=(
            "both_loads_are_first", "a_rivals_promise_is_kept", "hedges_have_no_budget",
            "the_loser_keeps_its_slots",
        ),
        to_s=1.3,
    ),
    Drill(
        "encode-stands-still", ("F62", "F48"), topology="2e1p1d", work=AT_ONCE, settings=EAGER,
        faults=(Fault("stall", "e0", duration_s=1.4),),
        fires=("EMBEDDING:LOADING>HEDGED", "hedges_won"), to_s=1.3,
    ),
    Drill(
        "late-and-not-wanted", ("F62", "F43"), topology="2e1p1d", work=HURRIED, settings=EAGER,
        faults=(
            Fault("stall", "e0", duration_s=1.4), Fault("slow", "e1", duration_s=1.4, factor=40.0),
        ),
        fires=("EMBEDDING:LOADING>HEDGED", "EMBEDDING:HEDGED>ABANDONED"),
        mutants=("a_rival_outlives_its_request",), to_s=1.3, must_fire=0.5,
    ),
    Drill(
        "late-since-its-offer-was-lost", ("F62", "F19"), topology="2e1p1d",
        work=replace(MANY_IMAGES, num_requests=48), settings=EAGER,
        faults=(
            Fault("reset", "here", point="MESSAGE:EncodeRequest", nth=60, other="e0"),
            Fault("kill", "e1", point="EMBEDDING:LOADING>HEDGED", nth=1, duration_s=0.4),
        ),
        fires=("EMBEDDING:HEDGED>LOADING",), mutants=("a_rival_ends_the_offer",), must_fire=0.5,
    ),
    Drill(
        "late-and-then-lost", ("F62", "F19"), topology="3e1p1d", work=MANY_IMAGES, settings=EAGER,
        faults=(
            Fault("stall", "e0", at_s=1.0, duration_s=1.4),
            Fault("kill", "e1", point="EMBEDDING:LOADING>HEDGED", nth=1, duration_s=0.4),
        ),
        fires=("EMBEDDING:HEDGED>LOADING",), mutants=("a_lost_rival_keeps_its_promise",), to_s=1.3,
        must_fire=0.5,
    ),
    Drill(
        "late-and-prefill-dies", ("F62", "F20", "F44"), topology="2e2p1d", work=MANY_IMAGES,
        settings=EAGER,
        faults=(
            Fault("stall", "e0", duration_s=1.4),
            Fault("kill", "here", point="EMBEDDING:LOADING>HEDGED", nth=3, duration_s=0.3),
        ),
        fires=("GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"), to_s=1.3,
    ),
    Drill(
        "late-and-a-group-dies", ("F62", "F20", "F29"), topology="2e2p:tp2,1d", work=MANY_IMAGES,
        settings=replace(EAGER, rank_lingers_s=1.0, restart_after_s=0.1),
        faults=(
            Fault("stall", "e0", duration_s=1.4),
            Fault("kill", "here", point="EMBEDDING:LOADING>HEDGED", nth=3, duration_s=0.3),
        ),
        fires=("GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"), to_s=1.3,
    ),
)
# fmt: on
