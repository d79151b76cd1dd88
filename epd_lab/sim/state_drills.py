"""Drills of states: what a sequence has besides KV moves last, and who gives way begins anew."""

from __future__ import annotations

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import Workload

STATE = Settings(has_state=True, num_blocks=128)
NO_STATE = {"settings.has_state": False}
LONG = Workload(24, image_share=0.5, max_text=60, spread_s=1.0)

STATE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "a-state-in-parts",
        ("F63",),
        work=LONG,
        settings=STATE,
        fires=("state_moved",),
        mutants=(
            "a_state_leaves_first",
            "a_state_lands_in_another_order",
            "a_state_is_not_sent",
            "a_token_is_computed_again",
        ),
        calm=NO_STATE,
    ),
    Drill(
        "a-state-gives-way",
        ("F63", "F24"),
        topology="1epd",
        work=Workload(40, image_share=0.2, max_images=1, max_tokens=50, spread_s=0.5),
        settings=Settings(has_state=True, num_blocks=36),
        fires=("state_given_up",),
        mutants=("who_begins_reads_the_state_that_was_there",),
        calm=NO_STATE,
    ),
    Drill(
        "kill-decode-with-states",
        ("F63", "F20"),
        topology="1e1p2d",
        work=LONG,
        settings=STATE,
        faults=(Fault("kill", "peer", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=("state_moved", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_state_leaves_first",),
        calm=NO_STATE,
    ),
    Drill(
        "kill-prefill-with-states",
        ("F63", "F20"),
        topology="1e2p1d",
        work=LONG,
        settings=STATE,
        faults=(Fault("kill", "here", duration_s=0.5, point="OUTGOING:GRANTED>STREAMING", nth=20),),
        fires=("state_moved", "GENERATION:MIGRATING>PLACED"),
        mutants=("a_state_lands_in_another_order",),
        calm=NO_STATE,
    ),
)
