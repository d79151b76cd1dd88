"""Drills of a gateway that has more to do than instances can: turns of keys, and refusals."""

from __future__ import annotations

from dataclasses import replace

from epd.config import Limits
from epd.frontend import TimeLimits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

SLOW = Costs(encode_per_patch_s=0.004)
"""An image takes a tenth of a second or so, as on a GPU a large one does."""

CROWD = Workload(
    60,
    spread_s=0.3,
    image_share=0.8,
    max_images=1,
    num_images=1000,
    num_tenants=2,
    crowd=2,
)
"""A key that shows images, and one with half as many texts."""

# fmt: off
ADMISSION_DRILLS: tuple[Drill, ...] = (
    Drill(
        "two-keys", ("F39",), topology="1e1pd",
        work=CROWD,
        settings=Settings(num_blocks=256, costs=SLOW, limits=Limits(max_open_requests=128)),
        fires=("waited_for_a_turn",), calm={"work.num_tenants": 1, "work.crowd": 1},
        mutants=("keys_share_a_line", "turns_do_not_count_costs"),
    ),
    Drill(
        "more-than-places", ("F39",), topology="1e1pd",
        work=replace(CROWD, num_returns=20),
        settings=Settings(num_blocks=256, costs=SLOW, limits=Limits(max_open_requests=24)),
        fires=("refused_with_a_time",), calm={"settings.limits.max_open_requests": 128},
        mutants=("retry_after_is_a_constant",),
    ),
    Drill(
        "more-than-in-time", ("F39",), topology="1e1pd",
        work=Workload(
            60, spread_s=1.5, image_share=1.0, max_images=1, num_images=1000, num_returns=20,
            limits=TimeLimits(1.5, 30.0, 30.0),
        ),
        settings=Settings(num_blocks=256, costs=SLOW, limits=Limits(max_open_requests=128)),
        may_fail=Excuse(frozenset({"deadline"}), refusals=False),
        why="who was let in while nobody knew what an image costs may wait longer than it has time",
        fires=("late_refused",), calm={"settings.costs": Costs()},
        mutants=("nobody_is_too_late",),
    ),
)
# fmt: on
