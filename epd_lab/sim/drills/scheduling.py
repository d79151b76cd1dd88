"""Drills of the batch: giving way when blocks run out, waiting in the middle of a prompt."""

from __future__ import annotations

import msgspec

from epd.config import DecodeConfig, EngineConfig, Limits, SpeculativeConfig, Timing
from epd.frontend import TimeLimits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

FEW_BLOCKS = Settings(num_blocks=32)
"""More than any one request can need, and less than all of them do."""
AHEAD = EngineConfig(max_step_tokens=48, max_chunk_tokens=16, async_scheduling=True)

TOO_FEW_BLOCKS = Settings(num_blocks=12)
"""Enough for most prompts, not for what some requests may still say."""

IMPATIENT = replace_timing(stall_timeout_s=0.12, max_attempts=1)
"""Shorter than a preempted request waits, and what is lost is not tried again."""

DRAFTING = msgspec.structs.replace(
    Settings().engine, speculative=SpeculativeConfig("ngram", 5, 1, 3)
)
"""With answers of a few words, most steps have drafts, and about half of them hold."""

ADAPTERS = ("pirate", "poet")

# fmt: off
SCHEDULING_DRILLS: tuple[Drill, ...] = (
    Drill(
        "late-images", ("F10", "F24"), topology="1e1pd",
        work=Workload(16, image_share=0.8, slow_share=0.3, spread_s=0.2, max_tokens=24),
        settings=FEW_BLOCKS, fires=("REQUEST:RUNNING>WAITING_MID_PROMPT",),
        mutants=("prompt_runs_over_its_image", "mid_prompt_is_forgotten"),
        calm={"settings.prefill.min_early_tokens": 1 << 20},
    ),
    Drill(
        "leave-mid-prompt", ("F21", "F22", "F43"),
        work=Workload(24, image_share=1.0, slow_share=0.5, spread_s=0.3, cancel_share=0.7),
        fires=("REQUEST:WAITING_MID_PROMPT>FINISHED",),
        mutants=("leaving_mid_prompt_keeps_blocks",), calm={"work.cancel_share": 0.0},
    ),
    Drill(
        "same-beginnings", ("F10", "F28"), topology="1epd",
        work=Workload(30, image_share=0.8, num_texts=2, num_images=8, spread_s=2.0),
        settings=Settings(num_blocks=48), fires=("prefix_hit",),
        mutants=("prefix_ignores_images", "prefix_ignores_what_is_before"),
        calm={"work.num_texts": 0, "work.num_images": 1 << 30},
    ),
    Drill(
        "same-beginnings-at-decode", ("F20", "F28"), topology="1e2p2d",
        work=Workload(30, image_share=0.6, num_texts=2, num_images=8, spread_s=2.0),
        faults=(Fault("kill", "d0", duration_s=0.5),), settings=Settings(num_blocks=48),
        fires=("kv_held", "GENERATION:MIGRATING>PLACED"),
        mutants=("first_blocks_are_sent", "prefix_ignores_images"),
        calm={"work.num_texts": 0, "work.num_images": 1 << 30},
    ),
    Drill(
        "two-tenants", ("F53",), topology="1e2p1d",
        work=Workload(24, image_share=0.2, num_texts=2, max_text=80, spread_s=2.0, num_tenants=2),
        settings=Settings(num_blocks=256), fires=("prefix_hit", "kv_held"),
        mutants=("keys_say_nothing_of_who_asks", "decode_is_not_told_who_asks"),
        calm={"work.num_texts": 0, "work.num_images": 1 << 30},
    ),
    Drill(
        "adapters-of-one-prompt", ("F53",), topology="1e2p2d",
        work=Workload(
            24, image_share=0.2, num_texts=2, max_text=80, spread_s=2.0, adapters=ADAPTERS
        ),
        faults=(Fault("kill", "here", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=8),),
        settings=Settings(num_blocks=256, adapters=ADAPTERS),
        fires=("prefix_hit", "GENERATION:MIGRATING>PLACED"),
        mutants=("keys_say_nothing_of_the_adapter", "decode_is_not_told_the_adapter"),
        calm={"work.num_texts": 0, "work.num_images": 1 << 30},
    ),
    Drill(
        "adapters-of-towers", ("F53",), topology="2e2p2d",
        work=Workload(
            24, image_share=0.9, num_images=3, spread_s=0.5, adapters=ADAPTERS, of_towers=ADAPTERS
        ),
        faults=(Fault("kill", "e0", duration_s=0.5, point="EMBEDDING:LOADING>RESIDENT", nth=3),),
        settings=Settings(num_blocks=256, adapters=ADAPTERS), fires=("GENERATION:ImageMoved",),
        mutants=("a_tower_without_its_adapter", "an_image_without_its_adapter"),
        calm={"work.num_images": 1 << 30},
    ),
    Drill(
        "kv-in-parts", ("F2", "F28"), work=Workload(20, image_share=0.6, max_text=60, spread_s=1.0),
        data=DataConditions(jitter_s=0.004, nbytes_per_s=2e5),
        fires=("OUTGOING:GRANTED>STREAMING", "OUTGOING:STREAMING>WRITING"),
        mutants=("commit_before_the_last_layer", "layers_are_final_too_early"),
        calm={"topology": "1epd"},
    ),
    Drill(
        "decode-while-receiving", ("F27",),
        work=Workload(
            24, image_share=0.0, max_text=60, max_tokens=200, spread_s=2.0,
            limits=TimeLimits(20.0, 1.0, 30.0),
        ),
        data=DataConditions(nbytes_per_s=4e3), settings=Settings(num_blocks=512),
        fires=("slow_write",), mutants=("decode_waits_for_what_arrives",),
        calm={"data": DataConditions()},
    ),
    Drill(
        "kill-prefill-in-parts", ("F7", "F20"), topology="1e2p1d",
        work=Workload(24, image_share=0.5, max_text=60, spread_s=1.0),
        faults=(Fault("kill", "here", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=(
            "GENERATION:MIGRATING>PLACED", "INCOMING:QUARANTINED>FAILED", "INSTANCE:EpochReplaced",
        ),
        mutants=("a_lost_attempt_is_an_error",),
    ),
    Drill(
        "kill-decode-in-parts", ("F6", "F20"), topology="1e1p2d",
        work=Workload(24, image_share=0.5, max_text=60, spread_s=1.0),
        faults=(Fault("kill", "peer", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=("GENERATION:MIGRATING>PLACED", "OUTGOING:PeerLost", "INSTANCE:EpochReplaced"),
        mutants=("who_is_gone_is_written_for",),
    ),
    Drill(
        "leave-in-parts", ("F6", "F24", "F43"),
        work=Workload(70, image_share=0.0, max_text=150, spread_s=0.5, cancel_share=0.9),
        data=DataConditions(jitter_s=0.02, nbytes_per_s=2e4),
        fires=("OUTGOING:STREAMING>CANCEL_PENDING",), calm={"work.cancel_share": 0.0},
        settings=Settings(num_blocks=512, limits=Limits(max_open_requests=128)),
        mutants=("who_leaves_does_not_wait_for_its_write",),
    ),
    Drill(
        "give-way-in-parts",
        ("F6", "F24"),
        topology="1e2pd1d",
        work=Workload(
            50,
            image_share=0.4,  # the others grow while these wait
            max_images=1,
            num_images=30,
            slow_share=0.5,
            max_text=40,
            max_tokens=50,
            spread_s=0.4,
        ),
        data=DataConditions(jitter_s=1.5, nbytes_per_s=2e4),  # parts are long on their way
        settings=Settings(
            num_blocks=30,
            limits=Limits(max_open_requests=128),
            timing=Timing(first_token_timeout_s=90.0, request_timeout_s=120.0),
        ),
        fires=("REQUEST:WAITING_MID_PROMPT>PREEMPTED",),
        must_fire=0.8,
        mutants=("parts_are_not_held",),
        calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "few-blocks-to-land-in", ("F24", "F43"),
        work=Workload(30, image_share=0.3, max_images=1, spread_s=0.3, cancel_share=0.5),
        data=DataConditions(nbytes_per_s=2e4, jitter_s=0.02),
        settings=Settings(num_landing_blocks=12),
        fires=("kv_waited_to_land", "INCOMING:AWAITING_LANDING>CANCELLED"),
        mutants=("who_waits_to_land_is_not_woken", "who_was_called_off_waits_to_land"),
        calm={"settings.num_landing_blocks": 0, "work.cancel_share": 0.0},
    ),
    Drill(
        "few-blocks", ("F24", "F43"), topology="1epd",
        work=Workload(
            40, image_share=0.3, spread_s=0.05, max_text=50, max_tokens=48, cancel_share=0.1,
        ),
        settings=Settings(num_blocks=34),
        fires=("REQUEST:DECODING>PREEMPTED", "REQUEST:RUNNING>PREEMPTED"),
        mutants=("preempted_says_it_again", "preempted_keeps_blocks"),
        calm={"settings.num_blocks": 1024}, must_fire=0.7,
    ),
    Drill(
        "few-places", ("F24", "F27"),
        work=Workload(24, image_share=0.3, spread_s=0.1, max_tokens=24),
        settings=Settings(decode=DecodeConfig(max_queue=64, max_running=3)), fires=("full_step",),
        mutants=("a_step_takes_all_who_decode",), calm={"settings.decode.max_running": 64},
    ),
    Drill(
        "leave-the-queue", ("F24", "F43"),
        work=Workload(
            30, image_share=0.3, spread_s=0.3, cancel_share=0.7, max_text=40, max_images=1,
        ),
        data=DataConditions(nbytes_per_s=1e3, jitter_s=0.02), settings=Settings(num_blocks=28),
        fires=("REQUEST:WAITING>FINISHED", "REQUEST:WAITING_FOR_REMOTE_KV>CALLED_OFF"),
        mutants=("who_leaves_the_queue_wakes_nobody",), calm={"work.cancel_share": 0.0},
    ),
    Drill(
        "preempted-is-not-lost", ("F20", "F24"), topology="1epd",
        work=Workload(40, image_share=0.0, spread_s=0.05, max_tokens=96),
        settings=Settings(num_blocks=34, timing=IMPATIENT), fires=("REQUEST:DECODING>PREEMPTED",),
        mutants=("preempted_is_silent",), calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "few-blocks-at-decode", ("F24",),
        work=Workload(40, image_share=0.3, spread_s=0.1, max_tokens=48), settings=FEW_BLOCKS,
        fires=("REQUEST:DECODING>PREEMPTED",), mutants=("preempted_without_its_rows",),
        calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "a-step-ahead", ("F6", "F28", "F43"), topology="1epd",
        work=Workload(60, image_share=0.3, spread_s=0.2, max_tokens=24, cancel_share=0.6),
        settings=Settings(engine=AHEAD, num_blocks=48),
        fires=("REQUEST:DECODING>FINISHING", "REQUEST:DECODING>ABORTING"),
        mutants=(
            "last_token_frees_blocks", "who_has_ended_stays_in_the_batch", "a_stale_token",
            "what_is_on_its_way_is_said_already",
        ),
        calm={"settings.engine.async_scheduling": False, "work.cancel_share": 0.0},
    ),
    Drill(
        "few-blocks-a-step-ahead", ("F24", "F6"),
        work=Workload(24, image_share=0.3, spread_s=0.1, max_tokens=48),
        settings=Settings(engine=AHEAD, num_blocks=32), fires=("REQUEST:DECODING>PREEMPTED",),
        mutants=("gives_way_under_a_step",), calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "too-long-for-decode", ("F20", "F24"),
        work=Workload(24, image_share=0.0, max_tokens=64, spread_s=0.2), settings=TOO_FEW_BLOCKS,
        faults=(Fault("kill", "d0", point="MESSAGE:Tokens", nth=100, duration_s=0.2),),
        may_fail=Excuse(frozenset({"capacity"}), refusals=False),
        why="what a request may need is more than the instance has: said at once, and why",
        fires=("GENERATION:PLACED>REJECTED", "GENERATION:STREAMING>MIGRATING"),
        mutants=("refusals_are_not_told", "what_was_said_counts_twice"),
        calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "drafts", ("F24", "F43"), topology="1epd",
        work=Workload(
            48, num_words=3, image_share=0.4, spread_s=0.4, max_tokens=24, cancel_share=0.1,
        ),
        settings=Settings(num_blocks=40, engine=DRAFTING),
        fires=("draft_accepted", "draft_rejected"),
        mutants=(
            "a_rejected_draft_is_said", "a_rejected_draft_keeps_its_place",
            "a_rejected_draft_is_published", "said_behind_its_end", "drafts_are_looked_back_at",
        ),
        calm={"settings.engine.speculative": SpeculativeConfig()},
    ),
    Drill(
        "drafts-a-step-ahead", ("F6", "F24"), topology="1epd",
        work=Workload(
            48, num_words=3, image_share=0.4, spread_s=0.4, max_tokens=24, cancel_share=0.1,
        ),
        settings=Settings(
            num_blocks=40, engine=msgspec.structs.replace(DRAFTING, async_scheduling=True),
        ),
        fires=("draft_accepted", "draft_rejected"), mutants=("a_step_runs_ahead_of_drafts",),
        calm={"settings.engine.speculative": SpeculativeConfig()},
    ),
    Drill(
        "drafts-at-decode", ("F20", "F24"), topology="1e1p2d",
        work=Workload(24, num_words=3, image_share=0.4, spread_s=1.0, max_tokens=40),
        settings=Settings(num_blocks=40, engine=DRAFTING),
        faults=(Fault("kill", "d0", point="MESSAGE:Tokens", nth=40, duration_s=1.0),),
        fires=("draft_accepted", "draft_rejected", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_rejected_draft_is_said",),
        calm={"settings.engine.speculative": SpeculativeConfig()},
    ),
)
# fmt: on
