"""Drills of instances that die or stand still, alone in their role or one of two."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import PATIENT, Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

FIRST_DECODE = "REQUEST:WAITING_FOR_REMOTE_KV>DECODING"

IMAGES = Workload(num_requests=12, image_share=1.0, spread_s=0.5)
MANY_IMAGES = Workload(num_requests=16, image_share=1.0, num_images=16, spread_s=0.5)
SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)
CARD = DataConditions(kind="rdma", nbytes_per_s=2e4, jitter_s=0.05)
SLOW_CARD = DataConditions(kind="rdma", nbytes_per_s=1e3, jitter_s=0.05)  # outlives a restart

# fmt: off
LOSS_DRILLS: tuple[Drill, ...] = (
    Drill(
        "kill-encode", ("F19", "F41", "F44"), topology="2e1p1d", work=IMAGES,
        faults=(
            Fault("kill", "e0", point="OUTGOING:GRANTED>AWAITING_SLOTS", nth=6, duration_s=0.4),
        ),
        mutants=("grants_reach_the_successor",),
        fires=("GENERATION:ImageMoved", "INCOMING:QUARANTINED>FAILED", "INSTANCE:EpochReplaced"),
    ),
    Drill(
        "kill-encode-card", ("F7", "F8", "F19"), topology="2e1p1d", work=MANY_IMAGES,
        data=SLOW_CARD,
        faults=(Fault("kill", "here", point="ENCODING:ENCODING>RESIDENT", nth=6, duration_s=0.05),),
        mutants=("lost_peer_frees_slots",),
        fires=("GENERATION:ImageMoved", "INCOMING:QUARANTINED>FAILED", "INSTANCE:EpochReplaced"),
    ),
    Drill(
        "kill-prefill", ("F20",), topology="1e2p1d",
        faults=(Fault("kill", "here", point="REQUEST:WAITING>RUNNING", nth=10, duration_s=0.5),),
        fires=("GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("a_lost_attempt_is_an_error",),
    ),
    Drill(
        "prefill-is-not-missed", ("F20",), topology="1e2p1d",
        work=Workload(10, max_tokens=64, spread_s=0.3, image_share=0.3),
        settings=Settings(costs=Costs(step_base_s=0.02), num_blocks=256),
        faults=(Fault("kill", "p0", duration_s=0.3),), fires=("INSTANCE:EpochReplaced",),
        mutants=("whoever_used_the_lost_is_tried_again", "keys_of_what_is_over_go_by_a_clock"),
    ),
    Drill(
        "kill-decode", ("F20",), topology="1e1p2d", work=Workload(16, max_tokens=24, spread_s=0.3),
        faults=(Fault("kill", "here", point="MESSAGE:Tokens", nth=40, duration_s=0.5),),
        must_fire=0.7, mutants=("migration_restarts_numbering",),
        fires=(
            "GENERATION:STREAMING>MIGRATING", "GENERATION:MIGRATING>PLACED",
            "INSTANCE:EpochReplaced",
        ),
    ),
    Drill(
        "kill-the-only-encode", ("F19", "F40", "F44"), work=IMAGES,
        faults=(Fault("kill", "here", point="ENCODING:PREPARED>ENCODING", nth=4, duration_s=0.5),),
        mutants=("answer_without_image", "both_lives_are_members"),
        fires=("GENERATION:ImageMoved", "INSTANCE:EpochReplaced"),
    ),
    Drill(
        "kill-the-only-prefill", ("F20", "F44"), faults=(Fault("kill", "p0", duration_s=0.5),),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("nobody_waits_for_a_restart",),
    ),
    Drill(
        "kill-the-only-decode", ("F20", "F44"), work=Workload(16, max_tokens=24, spread_s=0.3),
        faults=(Fault("kill", "here", point="MESSAGE:Tokens", nth=20, duration_s=0.5),),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("nobody_waits_for_a_restart", "migration_restarts_numbering"),
    ),
    Drill(
        "lose-the-only-prefill", ("F20",), faults=(Fault("kill", "p0", duration_s=4.0),),
        mutants=("nobody_waits_for_a_restart", "the_silent_are_lost_late"),
        fires=("INSTANCE:SUSPECT>LOST", "GENERATION:AWAITING_TOPOLOGY>PLACED"),
    ),
    Drill(
        "kill-the-only-instance", ("F19", "F20", "F44"), topology="1epd",
        faults=(Fault("kill", "epd0", duration_s=0.5),),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("nobody_waits_for_a_restart",),
    ),
    Drill(
        "stall-encode", ("F7", "F41"), topology="2e1p1d", work=IMAGES, data=CARD,
        faults=(Fault("stall", "here", point="ENCODING:QUEUED>PREPARED", nth=4, duration_s=4.5),),
        mutants=("lost_peer_frees_slots", "fence_says_what_it_hopes"),
        fires=(
            "INCOMING:RESERVED>QUARANTINED", "INCOMING:QUARANTINED>FAILED", "INSTANCE:SUSPECT>LOST",
            "expelled",
        ),
    ),
    Drill(
        "stall-beyond-deadline", ("F7", "F15", "F41"), topology="1e1p1d", work=IMAGES,
        faults=(
            Fault("stall", "here", point="OUTGOING:GRANTED>AWAITING_SLOTS", nth=4, duration_s=8.0),
        ),
        settings=Settings(timing=PATIENT), may_fail=Excuse(frozenset({"deadline"}), refusals=False),
        why="nobody is declared lost within these deadlines",
        fires=("GENERATION:DeadlinePassed", "INCOMING:EXPIRE_PENDING>QUARANTINED"), data=SLOW_LINK,
        mutants=("grace_frees_slots",),
    ),
    Drill(
        "stall-decode", ("F7", "F20"), topology="1e1p2d", data=SLOW_LINK,
        faults=(Fault("stall", "here", point=FIRST_DECODE, nth=6, duration_s=4.0),),
        mutants=("each_attempt_has_its_own_deadline",),
        fires=("INSTANCE:SUSPECT>LOST", "expelled", "GENERATION:MIGRATING>PLACED"),
    ),
    Drill(
        "stall-prefill", ("F20",), topology="1e2p1d", data=CARD,
        faults=(Fault("stall", "p0", duration_s=4.0),),
        fires=("INSTANCE:SUSPECT>LOST", "expelled", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_lost_attempt_is_an_error",),
    ),
)
# fmt: on
