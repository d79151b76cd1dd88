"""Drills of states: what a sequence has besides KV moves last, and who gives way begins anew, or
where a copy was kept."""

from __future__ import annotations

from dataclasses import replace

from epd.config import EngineConfig, SpeculativeConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.drills.scheduling import DRAFTING
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.workload import Workload

STATE = Settings(has_state=True, num_blocks=128)
WHOLE = EngineConfig(max_step_tokens=96, max_chunk_tokens=96, async_scheduling=True)
BY_LAYER = EngineConfig(async_scheduling=True, speculative=SpeculativeConfig("mtp", 3))
BITS = EngineConfig(max_step_tokens=16, max_chunk_tokens=8)
NO_STATE: dict[str, object] = {"settings.has_state": False}
AGAIN = Workload(30, image_share=0.5, num_texts=3, num_images=8, max_text=60, spread_s=2.0)
ALL_DIFFER: dict[str, object] = {"work.num_texts": 0, "work.num_images": 1 << 30}
LONG = Workload(24, image_share=0.5, max_text=60, spread_s=1.0)
FEW = Workload(12, image_share=0.5, max_text=60)
TEXTS = Workload(8, image_share=0.0, max_tokens=16)
EQUAL: dict[str, object] = {"topology": "1e1p:tp2,1d:tp2"}

# fmt: off
STATE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "a-state-in-parts", ("F63",), work=LONG, settings=STATE, fires=("state_moved",),
        mutants=(
            "a_state_leaves_first", "a_state_lands_in_another_order", "a_state_is_not_sent",
            "a_token_is_computed_again",
        ),
        calm=NO_STATE,
    ),
    Drill(
        "a-state-gives-way", ("F63", "F24"), topology="1epd",
        work=Workload(40, image_share=0.2, max_images=1, max_tokens=50, spread_s=0.5),
        settings=Settings(has_state=True, num_blocks=36), fires=("state_given_up",),
        mutants=("who_begins_reads_the_state_that_was_there",), calm=NO_STATE,
    ),
    Drill(
        "drafts-with-states", ("F63", "F24"), topology="1e1p2d",
        work=Workload(24, num_words=3, image_share=0.4, spread_s=1.0, max_tokens=40),
        settings=Settings(has_state=True, num_blocks=48, engine=DRAFTING),
        faults=(Fault("kill", "d0", point="MESSAGE:Tokens", nth=40, duration_s=1.0),),
        fires=("draft_accepted", "draft_rejected", "state_moved", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_rejected_draft_is_said", "a_rejected_draft_keeps_its_place"),
        calm=NO_STATE | {"settings.engine.speculative": SpeculativeConfig()},
    ),
    Drill(
        "drafts-of-a-layer", ("F6", "F63"), topology="1e1p2d",
        work=Workload(24, num_words=3, image_share=0.4, spread_s=1.0, max_tokens=40),
        settings=Settings(has_state=True, num_blocks=48, engine=BY_LAYER),
        faults=(Fault("kill", "d0", point="MESSAGE:Tokens", nth=40, duration_s=1.0),),
        fires=("draft_accepted", "draft_rejected", "state_moved", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_rejected_draft_is_said", "a_rejected_draft_keeps_its_place"),
        calm=NO_STATE | {"settings.engine.speculative": SpeculativeConfig()},
    ),
    Drill(
        "kill-decode-with-states", ("F63", "F20"), topology="1e1p2d", work=LONG, settings=STATE,
        faults=(Fault("kill", "peer", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=("state_moved", "GENERATION:MIGRATING>PLACED"), mutants=("a_state_leaves_first",),
        calm=NO_STATE,
    ),
    Drill(
        "kill-prefill-with-states", ("F63", "F20"), topology="1e2p1d", work=LONG, settings=STATE,
        faults=(Fault("kill", "here", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=("state_moved", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_state_lands_in_another_order",), calm=NO_STATE,
    ),
    Drill(
        "a-state-is-found-again", ("F63",), topology="1epd", work=AGAIN,
        settings=replace(STATE, engine=WHOLE), fires=("state_found",),
        mutants=(
            "a_state_is_kept_of_a_longer_beginning", "a_state_is_found_before_it_is_there",
            "a_state_that_is_read_may_be_given_away", "a_state_that_is_found_is_not_read",
            "a_chunk_passes_where_a_state_is_kept",
        ),
        calm=ALL_DIFFER,
    ),
    Drill(
        "a-state-is-found-by-who-gave-way", ("F63", "F24"), topology="1epd",
        work=replace(AGAIN, num_requests=40, image_share=0.2, max_tokens=50, cancel_share=0.5),
        settings=Settings(has_state=True, num_blocks=40, engine=BITS),
        fires=("state_found", "state_given_up"),
        mutants=("who_is_called_off_keeps_the_copies", "a_state_is_kept_of_a_longer_beginning"),
        calm=NO_STATE, must_fire=0.7,
    ),
    Drill(
        "a-state-is-found-at-prefill", ("F63", "F53"),
        work=replace(AGAIN, image_share=0.3, num_tenants=2), settings=STATE,
        fires=("state_found", "state_moved", "kv_held"),
        mutants=("a_state_is_not_sent", "a_state_that_is_found_is_not_read"),
        calm=NO_STATE | ALL_DIFFER,
    ),
    Drill(
        "a-state-between-groups", ("F63", "F29"), topology="1e1p:tp3,1d:tp2", work=FEW,
        settings=STATE, fires=("state_came_by_heads",),
        mutants=(
            "parts_of_a_state_are_of_the_first_heads", "a_part_of_a_state_is_left_out",
            "parts_of_a_state_change_places", "a_part_of_a_state_is_not_taken_in",
        ),
        calm=EQUAL,
    ),
    Drill(
        "rank-dies-with-states-on-their-way", ("F63", "F7", "F20", "F29"),
        topology="1e1p:tp2,1d:tp3", work=TEXTS, settings=STATE,
        data=DataConditions(kind="rdma", nbytes_per_s=2e3, linger_s=4.0),
        faults=(
            Fault("slow", "p0.1", factor=20.0),
            Fault("kill", "p0.1", point="MESSAGE:WriteState", nth=8),
        ),
        from_s=0.6, to_s=0.9, fires=("group_lost", "state_lost_on_its_way"),
        mutants=("a_leader_is_fenced_alone",),
    ),
    Drill(
        "rank-dies-as-states-come", ("F63", "F29"), topology="1e1p:tp2,1d:tp3", work=TEXTS,
        settings=STATE, faults=(Fault("kill", "d0.1", point="MESSAGE:LandKv", nth=8),),
        fires=("group_lost", "state_lost_as_it_came"), mutants=("a_rank_that_ends_is_a_fault",),
    ),
    Drill(
        "called-off-with-states-on-their-way", ("F63", "F24", "F29"), topology="1e1p:tp2,1d:tp3",
        work=Workload(24, image_share=0.0, max_text=60, max_tokens=16, cancel_share=0.7),
        settings=Settings(has_state=True, num_blocks=48),
        data=DataConditions(nbytes_per_s=2e4, jitter_s=0.02),
        fires=("OUTGOING:WRITING>CANCEL_PENDING", "state_came_by_heads"),
        mutants=("cancel_frees_slots", "a_part_is_taken_for_all", "publish_before_commit"),
        calm={"work.cancel_share": 0.0} | EQUAL,
    ),
)
# fmt: on
