"""Drills of inputs that kill whoever computes them."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.drills.elsewhere import EAGER
from epd_lab.sim.faults import Fault
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

IMAGES = Workload(24, image_share=1.0, num_images=64, spread_s=0.1)
PROMPTS = Workload(24, image_share=0.2, num_images=64, spread_s=0.05)
POISONED = Excuse(frozenset({"poison"}), refusals=False)
WHY = "what two instances died of is not sent to a third; the checker looks that nothing else is"


def _drill(name: str, topology: str, call: str, settings: Settings, *mutants: str) -> Drill:
    return Drill(
        name,
        ("F68",),
        topology=topology,
        work=IMAGES if call == "image" else PROMPTS,
        settings=settings,
        faults=(Fault("poison", "all", call=call, duration_s=0.6),),
        may_fail=POISONED,
        why=WHY,
        fires=("GENERATION:PoisonFound",),
        to_s=1.04,
        mutants=mutants,
    )


# fmt: off
POISON_DRILLS: tuple[Drill, ...] = (
    _drill(
        "an-image-is-poison", "3e1p1d", "image", EAGER, "deaths_are_not_counted",
        "the_silent_may_have_a_third", "who_waited_is_blamed", "suspects_are_batched",
    ),
    _drill(
        "a-prompt-is-poison", "3epd", "prompt", Settings(), "deaths_are_not_counted",
        "who_waited_is_blamed", "suspects_share_a_step",
    ),
    _drill(
        "a-prompt-is-poison-at-decode", "1e1p3d", "decode", Settings(), "deaths_are_not_counted",
    ),
    _drill(
        "a-prompt-is-poison-to-groups", "1e2p:tp2,1d", "prompt", Settings(),
        "deaths_are_not_counted",
    ),
    Drill(
        "a-group-loses-one-prompt-twice", ("F68", "F29"), topology="1e1p:tp2,1d",
        work=Workload(1, image_share=0.0),
        faults=(
            Fault("lose_command", "p0.1", point="GENERATION:QUEUED>PLACED", nth=1),
            Fault("lose_command", "p0.1", point="GENERATION:AWAITING_TOPOLOGY>PLACED", nth=1),
        ),
        may_fail=POISONED, why=WHY, fires=("GENERATION:PoisonFound", "group_lost"),
    ),
    Drill(
        "a-group-dies-beside-who-waits", ("F68", "F29"), topology="1e:tp2,1p1d",
        work=Workload(24, image_share=1.0, num_images=64, spread_s=1.0),
        faults=(Fault("lose_command", "e0.1", point="ENCODING:PREPARED>ENCODING", nth=2),),
        fires=("group_lost", "INSTANCE:EpochReplaced"),
        mutants=("what_left_counts_until_more_enters",),
    ),
)  # fmt: skip
# fmt: on
