"""Drills of rows of several kinds, each in blocks of its own, and all in one table."""

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
        settings=Settings(has_kinds=True, num_blocks=50, engine=AHEAD),
        fires=("prefix_hit", "REQUEST:DECODING>PREEMPTED"),
        mutants=("a_kind_is_found_alone", "what_is_begun_has_room"),
        calm={"settings.num_blocks": 1024} | ALL_DIFFER, must_fire=0.7,
    ),
    Drill(
        "blocks-of-two-kinds-at-decode", ("F20", "F28"), topology="1e2p2d", work=AGAIN,
        settings=Settings(has_kinds=True, num_blocks=96),
        faults=(Fault("kill", "d0", duration_s=0.5),),
        fires=("kv_held", "GENERATION:MIGRATING>PLACED"),
        mutants=("blocks_are_full_too_early",), calm=ALL_DIFFER,
    ),
)
# fmt: on
