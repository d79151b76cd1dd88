"""Drills of answers that look back: penalties, grammars, log-probabilities, stop strings."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import Workload

LOOKING_BACK = ("penalised", "grammar")
SLOW_STEPS = Settings(num_blocks=512, costs=Costs(step_base_s=0.02))
"""An answer of 400 tokens takes longer than a run waits for what is still owned."""

# fmt: off
ANSWER_DRILLS: tuple[Drill, ...] = (
    Drill(
        "migrate-what-looks-back", ("F20",), topology="1e1p2d",
        work=Workload(20, kinds=LOOKING_BACK, image_share=0.3, max_tokens=48, spread_s=0.3),
        faults=(Fault("kill", "d0", point="MESSAGE:Tokens", nth=30, duration_s=0.5),),
        # must_fire: in some seeds few streams are at d0
        fires=("GENERATION:STREAMING>MIGRATING",), must_fire=0.7,
        mutants=(
            "a_migration_forgets_what_was_said", "the_seed_starts_anew_at_a_migration",
            "bad_words_begin_anew_at_a_migration",
        ),
    ),
    Drill(
        "preempt-what-looks-back", ("F24",), topology="1epd",
        work=Workload(24, kinds=LOOKING_BACK, image_share=0.0, max_tokens=48, spread_s=0.1),
        settings=Settings(num_blocks=32), fires=("REQUEST:DECODING>PREEMPTED",),
        mutants=("a_preempted_grammar_starts_anew",), calm={"settings.num_blocks": 1024},
    ),
    Drill(
        "prompts-with-log-probabilities", ("F20", "F28"), topology="1e2p1d",
        work=Workload(
            24, kinds=("scored", "seeded"), image_share=0.3, max_text=60, num_texts=3, spread_s=1.0,
        ),
        settings=Settings(num_blocks=128), faults=(Fault("kill", "p0", duration_s=0.5),),
        fires=("prefix_hit", "GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"),
        mutants=(
            "only_the_last_chunk_is_scored", "a_scored_prompt_is_found_in_the_cache",
            "log_probabilities_of_other_tokens",
        ),
        calm={"work.num_texts": 0, "work.num_images": 1 << 30},
    ),
    Drill(
        "who-has-enough", ("F43",),
        work=Workload(12, stop_share=1.0, num_words=8, max_tokens=400, image_share=0.3),
        settings=SLOW_STEPS, fires=("GENERATION:STREAMING>STOPPING",),
        mutants=("who_has_enough_is_computed_on",), calm={"work.stop_share": 0.0},
    ),
)
# fmt: on
