"""Drills of pictures whose rows see each other both ways: no chunk cuts one, and none waits for
ever."""

from __future__ import annotations

from epd.config import EngineConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import GRIDS, Workload

LARGEST = max(t * h * w // 4 for t, h, w in GRIDS)
SMALL_STEPS = EngineConfig(max_step_tokens=LARGEST + 2, max_chunk_tokens=6, async_scheduling=True)
"""A picture is longer than a chunk, and leaves hardly any room for who decodes."""
WHOLE = Settings(max_uncut=LARGEST, engine=SMALL_STEPS, num_blocks=96)
CUT: dict[str, object] = {"settings.max_uncut": 0}

# fmt: off
PICTURE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "a-picture-among-decodes", ("F86",), topology="1epd",
        work=Workload(40, image_share=0.5, max_tokens=40, spread_s=0.3), settings=WHOLE,
        fires=("longer_for_a_picture",),
        mutants=(
            "a_chunk_ends_a_row_early", "the_next_picture_is_cut", "what_is_under_way_is_cut_again",
            "a_picture_has_what_decodes_leave",
        ),
        calm=CUT,
    ),
    Drill(
        "a-picture-is-found-in-part", ("F86", "F24"), topology="1epd",
        work=Workload(
            40, image_share=0.8, max_images=1, num_texts=2, num_images=8, max_text=40,
            max_tokens=48, spread_s=0.2,
        ),
        settings=Settings(max_uncut=LARGEST, engine=SMALL_STEPS, num_blocks=32),
        fires=("longer_for_a_picture", "prefix_hit", "REQUEST:DECODING>PREEMPTED"),
        mutants=("a_chunk_ends_a_row_early",),
        calm=CUT | {"work.num_texts": 0, "work.num_images": 1 << 30, "settings.num_blocks": 1024},
    ),
    Drill(
        "kill-decode-behind-pictures", ("F86", "F20"), topology="1e1p2d",
        work=Workload(24, image_share=0.9, max_tokens=40, spread_s=1.0), settings=WHOLE,
        faults=(Fault("kill", "d0", duration_s=0.5),),
        fires=("longer_for_a_picture", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_chunk_ends_a_row_early",), calm=CUT,
    ),
)
# fmt: on
