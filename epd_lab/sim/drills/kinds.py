"""Drills of rows of several kinds, each in blocks of its own, and all in one table; and of a kind
whose blocks go back behind a window."""

from __future__ import annotations

from epd.config import EngineConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import Workload

AHEAD = EngineConfig(max_step_tokens=48, max_chunk_tokens=16, async_scheduling=True)
AGAIN = Workload(30, image_share=0.5, num_texts=3, num_images=8, max_text=60, spread_s=1.0)
ALL_DIFFER: dict[str, object] = {"work.num_texts": 0, "work.num_images": 1 << 30}

# fmt: off
KIND_DRILLS: tuple[Drill, ...] = (
    Drill(
        "blocks-of-two-kinds", ("F24", "F28"), topology="1epd",
        work=Workload(
            40, image_share=0.3, num_texts=3, max_text=50, max_tokens=48, spread_s=0.05,
            cancel_share=0.1,
        ),
        settings=Settings(window=0, num_blocks=50, engine=AHEAD),
        fires=("prefix_hit", "REQUEST:DECODING>PREEMPTED"),
        mutants=("a_kind_is_found_alone", "what_is_begun_has_room"),
        calm={"settings.num_blocks": 1024} | ALL_DIFFER, must_fire=0.7,
    ),
    Drill(
        "blocks-of-two-kinds-at-decode", ("F20", "F28"), topology="1e2p2d", work=AGAIN,
        settings=Settings(window=0, num_blocks=96),
        faults=(Fault("kill", "d0", duration_s=0.5),),
        fires=("kv_held", "GENERATION:MIGRATING>PLACED"),
        mutants=("blocks_are_full_too_early",), calm=ALL_DIFFER,
    ),
    Drill(
        "windows-slide", ("F6", "F24", "F28"), topology="1epd",
        work=Workload(
            40, image_share=0.3, num_texts=3, max_text=60, max_tokens=48, spread_s=0.05,
            cancel_share=0.1,
        ),
        settings=Settings(window=10, num_blocks=64, engine=AHEAD),
        fires=("slides", "found_with_its_window", "REQUEST:DECODING>PREEMPTED"),
        mutants=(
            "a_block_too_many_is_passed", "no_block_is_passed", "what_is_passed_goes_back_twice",
            "a_hit_without_its_window", "what_was_taken_is_found",
        ),
        calm={"settings.num_blocks": 1024, "settings.window": 1024} | ALL_DIFFER, must_fire=0.7,
    ),
    Drill(
        "windows-of-pictures", ("F24", "F28", "F86"), topology="1epd",
        work=Workload(
            30, image_share=0.8, num_texts=3, max_text=40, max_tokens=32, spread_s=0.1,
            cancel_share=0.1,
        ),
        settings=Settings(window=5, num_blocks=64, max_uncut=16),
        fires=("slides",), mutants=("a_chunk_ends_a_row_early",),
        calm={"settings.window": 1024, "settings.num_blocks": 1024},
    ),
    Drill(
        "windows-at-decode", ("F6", "F20", "F28"), topology="1e2p2d", work=AGAIN,
        settings=Settings(window=10, num_blocks=128, engine=AHEAD),
        faults=(Fault("kill", "d0", duration_s=0.5),),
        fires=("slides", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_block_too_few_moves",), calm={"settings.window": 1024},
    ),
    Drill(
        "windows-leave", ("F6", "F20", "F28"), topology="1e1p1d",
        work=Workload(
            40, image_share=0.3, num_texts=4, num_images=8, max_text=60, max_tokens=24,
            spread_s=0.3,
        ),
        settings=Settings(window=10, num_blocks=56, engine=AHEAD),
        faults=(Fault("kill", "p0", point="REQUEST:RUNNING>TRANSFERRING", nth=8, duration_s=0.3),),
        fires=("kv_of_a_window", "kv_held_apart", "GENERATION:AWAITING_TOPOLOGY>PLACED"),
        mutants=(
            "a_block_too_few_moves", "a_window_goes_back_while_it_moves",
            "what_is_held_counts_first",
        ),
        calm={"settings.num_blocks": 1024, "settings.window": 1024}, must_fire=0.5,
    ),
)
# fmt: on
