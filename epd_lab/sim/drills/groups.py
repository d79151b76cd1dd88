"""Drills of instances of several ranks: skew, and ranks that die, hang, miss or come late."""

from __future__ import annotations

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import UNEVEN, Workload

MIXED = Workload(num_requests=16, image_share=0.4, max_tokens=24, spread_s=1.0)
IMAGES = Workload(num_requests=16, image_share=0.9, max_tokens=12, spread_s=0.5)
TEXTS = Workload(num_requests=8, image_share=0.0, max_tokens=24, spread_s=1.0)
MANY = Workload(num_requests=32, image_share=0.2, max_tokens=8, spread_s=1.0)
AHEAD = Settings(engine=msgspec.structs.replace(Settings().engine, async_scheduling=True))
"""Two steps are under way."""
CUT = Settings(engine=msgspec.structs.replace(Settings().engine, max_quantum_ms=4.0))
"""Batches of images take turns."""
SLOW_PROMPTS = Settings(
    num_blocks=36,
    engine=msgspec.structs.replace(Settings().engine, max_step_tokens=12, max_chunk_tokens=4),
)
"""Others take the blocks of a prompt whose image has been read."""
STEP = "GROUP:CommandGiven"
PUSHES = "OUTGOING:GRANTED>STREAMING"
LINGERING = Settings(rank_lingers_s=1.0, restart_after_s=0.1)
HASTY = Settings(timing=replace_timing(group_join_timeout_s=0.5))

ELSEWHERE = Settings(ranks_elsewhere=True, timing=replace_timing(group_step_timeout_s=4.0))
"""Only the kernel's probes notice in time that a host is silent."""

# fmt: off
GROUP_DRILLS: tuple[Drill, ...] = (
    Drill(
        "ranks-apart", ("F29",), topology="1e1pd:tp3", work=MIXED, settings=AHEAD,
        faults=(
            Fault("slow", "pd0.1", point=STEP, nth=5, factor=8.0, duration_s=0.6),
            Fault("stall", "pd0.2", point=STEP, nth=20, duration_s=0.5),
        ),
        mutants=("a_rank_admits_by_itself", "a_rank_overtakes"),
    ),
    Drill(
        "rank-dies", ("F29",), topology="1e2pd:tp2", work=MIXED, settings=AHEAD,
        faults=(Fault("kill", "pd0.1", point=STEP, nth=12),), fires=("group_lost",),
        mutants=("half_a_group_goes_on",),
    ),
    Drill(
        "only-group-dies", ("F29",), topology="1epd:tp2", work=MIXED,
        faults=(
            Fault("kill", "epd0.1", point=STEP, nth=8),
            Fault("kill", "epd0", point="GROUP:FORMING>READY", nth=1, duration_s=0.3),
        ),
        fires=("GROUP:RankEnded",), mutants=("an_answer_overtakes",),
    ),
    Drill(
        "rank-hangs", ("F29", "F15"), topology="1e2pd:tp2", work=MIXED, settings=AHEAD,
        faults=(Fault("stall", "pd0.1", point=STEP, nth=12),), fires=("GROUP:BeatsMissed",),
        mutants=("beats_are_not_looked_at",),
    ),
    Drill(
        "device-of-a-rank-hangs", ("F29", "F15"), topology="1e2pd:tp2", work=MIXED, settings=AHEAD,
        faults=(Fault("hang", "pd0.1", point=STEP, nth=12),), fires=("GROUP:AnswerMissed",),
        mutants=("a_silent_rank_is_waited_for",),
    ),
    Drill(
        "rank-loses-its-device", ("F29", "F49"), topology="1e:tp2,1pd", work=IMAGES,
        faults=(Fault("lose_device", "e0", point="ENCODING:PREPARED>ENCODING", nth=4),),
        fires=("GROUP:RankEnded",), mutants=("a_lost_device_is_one_failure",),
    ),
    Drill(
        "command-lost", ("F29",), topology="1e2pd:tp2", work=MIXED, settings=AHEAD,
        faults=(Fault("lose_command", "pd0.1", point=STEP, nth=12, factor=1.0),),
        fires=("command_lost", "group_lost"), mutants=("a_number_is_not_looked_at",),
    ),
    Drill(
        "rank-dies-encoding", ("F29",), topology="2e:tp2,1epd:tp3", work=IMAGES, settings=CUT,
        faults=(
            Fault("slow", "epd0.2", point=STEP, nth=5, factor=8.0, duration_s=0.6),
            Fault("kill", "e0.1", point="ENCODING:PREPARED>ENCODING", nth=3),
        ),
        fires=("group_lost",), mutants=("a_rank_sorts_its_images", "a_rank_counts_its_own_turns"),
    ),
    Drill(
        "uneven-images", ("F29",), topology="1e:tp2,1pd",
        work=Workload(16, image_share=1.0, num_images=24, spread_s=0.02, grids=UNEVEN),
        settings=Settings(
            encode=msgspec.structs.replace(Settings().encode, cache_device_nbytes=1 << 16),
        ),
        faults=(Fault("stall", "e0", point="ENCODING:PREPARED>ENCODING", duration_s=0.05),),
        mutants=("a_batch_is_bounded_as_a_whole",),
    ),
    Drill(
        "rows-at-ranks", ("F8", "F29"), topology="2e1pd:tp3", work=IMAGES,
        data=DataConditions(corrupt=0.04, failed=0.02, unknown=0.02, jitter_s=0.02),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a failed part",
        faults=(Fault("stall", "pd0.2", point=STEP, nth=6, duration_s=0.3),),
        calm={"data.corrupt": 0.0, "data.failed": 0.0, "data.unknown": 0.0},
        mutants=("parts_go_to_the_wrong_ranks", "rows_at_ranks_are_believed"),
    ),
    Drill(
        "ranks-give-way", ("F24", "F29"), topology="1e1pd:tp3",
        work=Workload(60, image_share=0.4, max_images=1, spread_s=0.1, max_text=60, max_tokens=48),
        settings=SLOW_PROMPTS, fires=("rows_read_again",), must_fire=0.5,
        calm={"settings.num_blocks": 1024},
        mutants=("rows_of_the_preempted_are_given_up", "a_rank_is_told_of_rows_once"),
    ),
    Drill(
        "rank-late", ("F30",), topology="1e2pd:tp2", work=MIXED, settings=HASTY,
        faults=(Fault("stall", "pd0.1"), Fault("stall", "pd1.1")), fires=("GROUP:JoinMissed",),
        from_s=0.1, to_s=0.12,
    ),
    Drill(
        "rank-of-the-dead", ("F30",), topology="1epd:tp2", work=MIXED, settings=LINGERING,
        faults=(Fault("kill", "epd0", duration_s=0.05),), from_s=0.1, to_s=0.2,
        mutants=("ranks_of_all_lives_meet",),
    ),
    Drill(
        "part-is-late", ("F29",), topology="1e1p:tp2,1d:tp3", work=MIXED, settings=AHEAD,
        faults=(
            Fault("slow", "p0.1", point=PUSHES, nth=3, factor=20.0, duration_s=1.0),
            Fault("stall", "p0", point=PUSHES, nth=12, duration_s=0.3),
        ),
        mutants=("a_part_is_taken_for_all",),
    ),
    Drill(
        "part-fails", ("F8", "F29"), topology="1e2p:tp2,2d:tp2", work=MANY,
        data=DataConditions(failed=0.07, unknown=0.07, jitter_s=0.02),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a failed part",
        fires=("FAN_OUT:WRITING>FAILING", "FAN_OUT:WRITING>DOUBTED"),
        calm={"data.failed": 0.0, "data.unknown": 0.0},
        mutants=("a_failed_part_is_told_at_once", "a_part_in_doubt_has_failed"),
    ),
    Drill(
        "rank-dies-in-transfer", ("F7", "F29"), topology="1e2p:tp2,1d:tp2", work=MIXED,
        data=DataConditions(kind="rdma", linger_s=4.0, nbytes_per_s=2e3),
        faults=(Fault("slow", "p0.1", factor=20.0), Fault("kill", "p0.1", point=PUSHES, nth=4)),
        fires=("group_lost", "INCOMING:PeerFenced"), from_s=0.6, to_s=0.9,
        mutants=("a_leader_is_fenced_alone",),
    ),
    Drill(
        "rank-dies-writing-last", ("F7", "F8", "F29"), topology="1e1p:tp2,1d:tp2", work=TEXTS,
        data=DataConditions(kind="rdma", linger_s=4.0, nbytes_per_s=2e3),
        faults=(
            Fault("slow", "p0.1", factor=20.0),
            Fault("kill", "p0.1", point="FAN_OUT:PartWritten", nth=4),
        ),
        fires=("FAN_OUT:WRITING>UNKNOWN", "group_lost", "INCOMING:PeerFenced"), from_s=0.6,
        must_fire=0.4,  # or the process ends before it takes the outcome of the part
        to_s=0.9, mutants=("a_rank_that_ends_has_failed",),
    ),
    Drill(
        "granting-rank-dies", ("F8", "F29"), topology="1e1p:tp2,2d:tp2", work=MIXED,
        data=DataConditions(jitter_s=0.05), faults=(Fault("kill", "d0.1", point=PUSHES, nth=6),),
        fires=("group_lost",),
    ),
    Drill(
        "host-of-a-rank-dies", ("F29", "F30"), topology="1e2pd:tp2", work=MIXED, settings=ELSEWHERE,
        faults=(Fault("power_off", "pd0.1", point=STEP, nth=12, duration_s=3.0),),
        fires=("given_up_when_cut", "group_lost"), mutants=("a_silent_host_is_waited_for",),
    ),
    Drill(
        "cable-of-a-group-is-cut", ("F29", "F30"), topology="1e2pd:tp2", work=MIXED,
        settings=ELSEWHERE,
        faults=(
            Fault("partition", "pd0.1", point=STEP, nth=12, other="pd0", duration_s=3.0),
            Fault("partition", "pd1.1", point=STEP, nth=20, other="pd1", duration_s=0.5),
        ),
        fires=("given_up_when_cut", "group_lost"), mutants=("a_silent_host_is_waited_for",),
    ),
    Drill(
        "rank-comes-late", ("F29", "F30"), topology="1e2pd:tp3", work=MIXED, settings=ELSEWHERE,
        faults=(
            Fault("stall", "pd1.1", duration_s=1.0),
            Fault("kill", "peer", point="MESSAGE:PlaceAsked", nth=2, duration_s=0.2),
        ),
        fires=("place_left",), must_fire=0.4, mutants=("a_place_is_taken_for_good",), from_s=0.1,
        to_s=0.12,
    ),
    Drill(
        "rank-of-an-old-life", ("F30",), topology="1e2pd:tp2", work=MIXED, settings=ELSEWHERE,
        faults=(Fault("kill", "here", point="MESSAGE:FirstFrame", nth=2, duration_s=0.01),),
        fires=("place_refused",), must_fire=0.8, mutants=("a_place_is_of_any_life",),
    ),
)
# fmt: on
