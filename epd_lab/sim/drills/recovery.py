"""Drills of giving up in good order: attempts called off and tried again, writes in doubt."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epd.frontend import TimeLimits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import PATIENT, Drill, replace_timing
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

IMAGES = Workload(num_requests=12, image_share=1.0, spread_s=0.5)
FIRST_DECODE = "REQUEST:WAITING_FOR_REMOTE_KV>DECODING"

IN_DOUBT = "OUTGOING:WRITING>QUARANTINED"

NOBODY_IS_LOST = replace_timing(suspect_after_s=20.0, lost_after_s=30.0)
LATE = Excuse(frozenset({"deadline"}), refusals=False)

# fmt: off
RECOVERY_DRILLS: tuple[Drill, ...] = (
    Drill(
        "long-answers", ("F15",),
        work=Workload(24, image_share=0.2, max_tokens=400, limits=TimeLimits(5.0, 1.0, 0.3)),
        settings=Settings(num_blocks=512), fires=("cut_at_its_deadline",),
        calm={"work.max_tokens": 12}, mutants=("a_late_answer_is_taken_back",),
    ),
    Drill(
        "long-answers-of-the-dead", ("F15", "F20"),
        work=Workload(12, image_share=0.2, max_tokens=400, limits=TimeLimits(5.0, 5.0, 2.0)),
        settings=Settings(num_blocks=512, timing=NOBODY_IS_LOST),
        faults=(Fault("stall", "d0", point=FIRST_DECODE, nth=8, duration_s=6.0),),
        fires=("cut_at_its_deadline", "GENERATION:DeadlinePassed"),
        mutants=("the_end_of_its_time_is_an_error",), may_fail=LATE,
        why="who has no token yet when the only decode stops has nothing to be cut",
    ),
    Drill(
        "late-first-token", ("F15",),
        work=Workload(12, image_share=0.3, limits=TimeLimits(1.0, 5.0, 20.0)),
        faults=(Fault("hang", "p0", duration_s=6.0),), may_fail=LATE,
        why="a device hangs, and its clients wait no longer",
        fires=("GENERATION:PLACED>FAILED", "GENERATION:TokenTimedOut"),
        mutants=("patience_has_no_end",), to_s=1.4,
    ),
    Drill(
        "hung-encode-is-left", ("F15", "F48"), topology="2e1p1d",
        work=Workload(12, image_share=1.0, spread_s=0.5, limits=TimeLimits(9.0, 9.0, 40.0)),
        faults=(Fault("hang", "here", point="ENCODING:PREPARED>ENCODING", nth=4, duration_s=16.0),),
        settings=replace(
            Settings(), prefill=msgspec.structs.replace(Settings().prefill, rows_timeout_s=0.5),
        ),
        fires=(
            "INCOMING:RESERVED>EXPIRE_PENDING", "ENCODING:ENCODING>ABANDONED",
            "GENERATION:ImageMoved",
        ),
        mutants=("rooms_wait_for_ever",),
    ),
    Drill(
        "late-token", ("F15",),
        work=Workload(12, image_share=0.2, max_tokens=100, limits=TimeLimits(5.0, 1.0, 20.0)),
        faults=(Fault("hang", "d0", point=FIRST_DECODE, duration_s=6.0, nth=8),), may_fail=LATE,
        why="a device hangs, and its clients wait no longer",
        fires=("GENERATION:STREAMING>FAILED", "GENERATION:TokenTimedOut", "device_hangs"),
        mutants=("patience_has_no_end",),
    ),
    Drill(
        "patient-clients", ("F15",),
        work=Workload(20, image_share=0.2, max_tokens=800, limits=TimeLimits(0.5, 5.0, 20.0)),
        settings=Settings(num_blocks=1024), fires=("outlasted_its_patience",),
        mutants=("patience_is_not_renewed",), calm={"work.max_tokens": 12},
    ),
    Drill(
        "deaf-prefill", ("F16", "F41"), topology="1e1p1d", work=IMAGES,
        faults=(Fault("block", "gateway", other="p0", duration_s=6.0),),
        may_fail=Excuse(frozenset({"lost"}), refusals=False),
        why="prefill beats its heart and hears nothing: four attempts can be spent on it",
        mutants=("attempts_are_not_called_off",), to_s=1.3,
        fires=(
            "GENERATION:AttemptTimedOut", "LINK:MUTE>UNREACHABLE", "GENERATION:MIGRATING>PLACED",
        ),
    ),
    Drill(
        "drain-decode", ("F20", "F55"), topology="1e1p1d",
        work=Workload(20, spread_s=0.1, max_tokens=24),
        network=Conditions(duplication=0.9, late_copy_s=0.1),
        settings=Settings(costs=Costs(step_base_s=0.02), num_blocks=128),
        faults=(
            Fault("block", "d0", point=FIRST_DECODE, other="gateway", duration_s=0.3),
            Fault("drain", "d0", point=FIRST_DECODE),
        ),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED",),
        mutants=(
            "no_pause_between_attempts", "a_lost_attempt_is_an_error",
            "who_drains_refuses_what_it_has",
        ),
    ),
    Drill(
        "drain-unheard", ("F55", "F61"), topology="1e1p1d",
        work=Workload(20, spread_s=0.1, max_tokens=64),
        settings=Settings(costs=Costs(step_base_s=0.02), num_blocks=256),
        faults=(
            Fault("haunt", "d0", point=FIRST_DECODE, call="Heartbeat"),
            Fault("drain", "d0", point=FIRST_DECODE),
        ),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED",), mutants=("who_is_away_is_counted",),
    ),
    Drill(
        "two-of-one-name", ("F78",), topology="2e1p1d", work=Workload(16, spread_s=2.0),
        network=Conditions(duplication=0.5, late_copy_s=0.5), faults=(Fault("impersonate", "e0"),),
        mutants=("whoever_has_the_name_is_the_next_life", "the_living_defend_no_name"),
        fires=("INSTANCE:AWAITING_NAME>LEFT", "MEMBERSHIP:AWAITING_NAME>REJECTED"),
    ),
    Drill(
        "the-name-of-the-dead", ("F78",), topology="2e1p1d", work=Workload(16, spread_s=4.0),
        to_s=1.2,
        faults=(Fault("kill", "e0"), Fault("impersonate", "e0", point="INSTANCE:HEALTHY>SUSPECT")),
        fires=("INSTANCE:AWAITING_NAME>HEALTHY", "MEMBERSHIP:AWAITING_NAME>MEMBER"),
    ),
    Drill(
        "the-name-of-one-who-returns", ("F44", "F78"), topology="2e1p1d",
        faults=(
            Fault("stall", "e0", duration_s=5.0),
            Fault("impersonate", "e0", point="INSTANCE:HEALTHY>SUSPECT"),
        ),
        mutants=("who_returns_is_not_answered",),
        fires=("INSTANCE:AWAITING_NAME>HEALTHY", "MEMBERSHIP:CUT_OFF>EXPELLED"),
    ),
    Drill(
        "a-new-gateway-counts-anew", ("F17", "F35", "F44"), topology="2e1p1d", work=Workload(8),
        faults=(
            Fault("kill", "e1", duration_s=0.1),
            Fault("kill", "gateway", point="INSTANCE:EpochReplaced", duration_s=0.2),
            Fault("kill", "e0", point="INSTANCE:EpochReplaced", duration_s=0.2),
        ),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        mutants=("a_list_outlives_its_registry",),
    ),
    Drill(
        "signs-of-life-lost", ("F16", "F20"),
        work=Workload(24, image_share=0.0, max_tokens=60, spread_s=0.5),
        network=Conditions(loss=0.3),
        settings=Settings(
            num_blocks=20, costs=Costs(step_base_s=0.1),
            timing=replace_timing(accept_timeout_s=0.4, stall_timeout_s=3.0, lost_after_s=4.0),
        ),
        may_fail=Excuse(frozenset({"lost", "deadline", "unavailable"}), refusals=True),
        why="four attempts can each lose a message that only the next attempt repeats",
        fires=("lost",), mutants=("who_waits_is_silent_when_inquired_after",),
        calm={"network.loss": 0.0, "settings.num_blocks": 256},
    ),
    Drill(
        "last-messages-lost", ("F16", "F20"), topology="1e1p2d",
        work=Workload(36, max_tokens=4, spread_s=2.0), network=Conditions(loss=0.1),
        may_fail=Excuse(frozenset({"lost", "deadline", "unavailable"}), refusals=True),
        why="four attempts can each lose a message that only the next attempt repeats",
        fires=("last_message_lost", "lost"), mutants=("nobody_asks_for_last_messages",),
        calm={"network.loss": 0.0},
    ),
    Drill(
        "prefill-fails-unheard", ("F16", "F20"), work=Workload(8, max_tokens=3),
        settings=Settings(costs=Costs(step_base_s=0.3)),
        faults=(
            Fault("oom", "p0", point="REQUEST:ChunkComputed", nth=4),
            Fault("reset", "p0", point="MESSAGE:RequestFailed", other="gateway"),
        ),
        engine_faults=True, must_fire=0.7, fires=("last_message_lost",),
        # calm: with slow steps a question crosses the answer now and then
        mutants=("what_failed_at_prefill_goes_on",), calm={"settings": Settings()},
    ),
    Drill(
        "kill-prefill-unheard",
        ("F16", "F20"),
        topology="1e2p2d",
        work=Workload(40, max_tokens=24, spread_s=0.8),
        faults=(
            Fault(
                "block",
                "p0",
                point="REQUEST:RUNNING>TRANSFERRING",
                nth=6,
                other="d0",
                duration_s=8.0,
            ),
            Fault("kill", "p0", duration_s=0.5),
        ),
        mutants=("prefill_says_the_first_token",),
        to_s=1.6,
        fires=(
            "GENERATION:MIGRATING>PLACED",
            "INSTANCE:EpochReplaced",
        ),
        from_s=1.3,
    ),
    Drill(
        "sick-encode", ("F13", "F14"), topology="2e1p1d", work=IMAGES,
        faults=(Fault("oom", "here", point="ENCODING:QUEUED>PREPARED", nth=2, factor=1000),),
        mutants=("only_the_messenger_is_avoided",), engine_faults=True,
        fires=("ENCODING:ENCODING>FAILED", "GENERATION:MIGRATING>PLACED"),
    ),
    Drill(
        "lose-the-encode-device", ("F49",), work=IMAGES,
        faults=(Fault("lose_device", "here", point="ENCODING:PREPARED>ENCODING", nth=4),),
        fires=("device_lost", "ENCODING:ENCODING>FAILED", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_lost_device_goes_on",), engine_faults=True,
    ),
    Drill(
        "lose-a-language-device", ("F49",),
        faults=(Fault("lose_device", "here", point="REQUEST:WAITING>RUNNING", nth=6),),
        fires=("device_lost", "REQUEST:StepFailed", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_lost_device_goes_on",), engine_faults=True,
    ),
    Drill(
        "stall-the-only-encode", ("F7", "F15"), work=IMAGES,
        faults=(Fault("stall", "here", point="ENCODING:QUEUED>PREPARED", nth=4, duration_s=8.0),),
        settings=Settings(timing=PATIENT), may_fail=Excuse(frozenset({"deadline"}), refusals=False),
        why="nobody is declared lost within these deadlines",
        mutants=("the_living_are_fenced", "what_is_not_stranded_any_more_is_kept"),
        fires=("GENERATION:DeadlinePassed", "INCOMING:EXPIRE_PENDING>QUARANTINED"),
    ),
    Drill(
        "bytes-change-in-flight", ("F54",), topology="2e1p1d", work=IMAGES,
        data=DataConditions(kind="rdma", corrupt=0.15),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet bytes that are not those that were sent",
        fires=("corrupted", "INCOMING:PublishFailed", "GENERATION:MIGRATING>PLACED"),
        mutants=("only_the_first_part_is_summed",), calm={"data.corrupt": 0.0},
    ),
    Drill(
        "writes-in-doubt", ("F6", "F8"), topology="2e1p1d", work=IMAGES,
        data=DataConditions(kind="rdma", unknown=0.2, linger_s=1.0, nbytes_per_s=2e5),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a write whose outcome is unknown",
        fires=("OUTGOING:WriteOutcomeUnknown", "OUTGOING:WriteSettled", "INCOMING:DoubtReceived"),
        mutants=("doubt_frees_the_source", "doubt_frees_the_slots", "doubt_waits_for_a_death"),
        calm={"data.unknown": 0.0},
    ),
    Drill(
        "restart-gateway-in-doubt", ("F7", "F8", "F35"), work=IMAGES,
        data=DataConditions(kind="rdma", unknown=0.6, linger_s=6.0),
        faults=(
            Fault("kill", "gateway", point="INCOMING:RESERVED>QUARANTINED", duration_s=0.2),
            Fault("stall", "e0", point="INCOMING:RESERVED>QUARANTINED", duration_s=2.2),
        ),
        may_fail=Excuse(frozenset({"gateway", "transfer", "deadline"}), refusals=True),
        why="clients of a dead gateway see their connection break; writes in doubt use up attempts "
        "or time",
        mutants=("a_new_registry_is_whole_at_once",),
        fires=("OUTGOING:WriteOutcomeUnknown", "LINK:PeerLost"), calm={"data.unknown": 0.0},
    ),
)
# fmt: on
