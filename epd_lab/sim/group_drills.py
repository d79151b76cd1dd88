"""Drills of instances of several ranks: skew, and ranks that die, hang, miss or come late."""

from __future__ import annotations

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drill import Drill, replace_timing
from epd_lab.sim.faults import Fault
from epd_lab.sim.workload import Workload

MIXED = Workload(num_requests=16, image_share=0.4, max_tokens=24, spread_s=1.0)
IMAGES = Workload(num_requests=16, image_share=0.9, max_tokens=12, spread_s=0.5)
AHEAD = Settings(engine=msgspec.structs.replace(Settings().engine, async_scheduling=True))
"""Two steps are under way."""
STEP = "GROUP:CommandGiven"
LINGERING = Settings(rank_lingers_s=1.0, restart_after_s=0.1)
HASTY = Settings(timing=replace_timing(group_join_timeout_s=0.5))

GROUP_DRILLS: tuple[Drill, ...] = (
    Drill(
        "ranks-apart",
        ("F29",),
        topology="1e1pd:tp3",
        work=MIXED,
        settings=AHEAD,
        faults=(
            Fault("slow", "pd0.1", point=STEP, nth=5, factor=8.0, duration_s=0.6),
            Fault("stall", "pd0.2", point=STEP, nth=20, duration_s=0.5),
        ),
        mutants=("a_rank_admits_by_itself", "a_rank_overtakes"),
    ),
    Drill(
        "rank-dies",
        ("F29",),
        topology="1e2pd:tp2",
        work=MIXED,
        settings=AHEAD,
        faults=(Fault("kill", "pd0.1", point=STEP, nth=12),),
        fires=("group_lost",),
        mutants=("half_a_group_goes_on",),
    ),
    Drill(
        "only-group-dies",
        ("F29",),
        topology="1epd:tp2",
        work=MIXED,
        faults=(
            Fault("kill", "epd0.1", point=STEP, nth=8),
            Fault("kill", "epd0", point="GROUP:FORMING>READY", nth=1, duration_s=0.3),
        ),
        fires=("GROUP:RankEnded",),
        mutants=("an_answer_overtakes",),
    ),
    Drill(
        "rank-hangs",
        ("F29", "F15"),
        topology="1e2pd:tp2",
        work=MIXED,
        settings=AHEAD,
        faults=(Fault("stall", "pd0.1", point=STEP, nth=12),),
        fires=("GROUP:AnswerMissed",),
        mutants=("a_silent_rank_is_waited_for",),
    ),
    Drill(
        "command-lost",
        ("F29",),
        topology="1e2pd:tp2",
        work=MIXED,
        settings=AHEAD,
        faults=(Fault("lose_command", "pd0.1", point=STEP, nth=12, factor=1.0),),
        fires=("command_lost", "group_lost"),
        mutants=("a_number_is_not_looked_at",),
    ),
    Drill(
        "rank-dies-encoding",
        ("F29",),
        topology="2e:tp2,1epd:tp3",
        work=IMAGES,
        faults=(
            Fault("slow", "epd0.2", point=STEP, nth=5, factor=8.0, duration_s=0.6),
            Fault("kill", "e0.1", point="ENCODING:PREPARED>ENCODING", nth=3),
        ),
        fires=("group_lost",),
        mutants=("a_rank_sorts_its_images",),
    ),
    Drill(
        "rank-late",
        ("F30",),
        topology="1e2pd:tp2",
        work=MIXED,
        settings=HASTY,
        faults=(Fault("stall", "pd0.1"), Fault("stall", "pd1.1")),
        fires=("GROUP:JoinMissed",),
        from_s=0.1,
        to_s=0.12,
    ),
    Drill(
        "rank-of-the-dead",
        ("F30",),
        topology="1epd:tp2",
        work=MIXED,
        settings=LINGERING,
        faults=(Fault("kill", "epd0", duration_s=0.05),),
        from_s=0.1,
        to_s=0.2,
        mutants=("ranks_of_all_lives_meet",),
    ),
)
