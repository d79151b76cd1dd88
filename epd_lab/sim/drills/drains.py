"""Drills of drains that an operator asks for, and of other roles.

What is open at the bound moves, with its KV if it decodes.  Nothing is lost when the gateway or an
end of a move dies meanwhile, or when every instance is restarted, one by one.  An instance returns
with the roles that it was asked to have, or with its former ones and a reason."""

from __future__ import annotations

from dataclasses import replace

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.drills.kinds import AHEAD
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

STREAMS = Workload(24, spread_s=0.5, max_tokens=64)
SLOW = Settings(costs=Costs(step_base_s=0.02), num_blocks=256)
LONG = Workload(16, spread_s=0.5, max_tokens=128, image_share=0.3)
LOOKS_BACK = Workload(16, spread_s=0.5, max_tokens=128, kinds=("penalised", "grammar"))
SLOWER = Settings(costs=Costs(step_base_s=0.05), num_blocks=512)
SOON = Settings(
    costs=Costs(step_base_s=0.02), num_blocks=256, timing=replace_timing(drain_timeout_s=0.1)
)
ASKED = (Fault("ask_drain", "pd0", duration_s=0.1),)
MOVED = ("GENERATION:AttemptMoved", "REQUEST:ARRIVED>TRANSFERRING")

# fmt: off
DRAIN_DRILLS: tuple[Drill, ...] = (
    Drill(
        "drain-at-its-bound", ("F55",), topology="1e2pd", work=LONG,
        settings=replace(SLOWER, engine=AHEAD),
        faults=ASKED, from_s=1.2, to_s=1.6, fires=MOVED,
        mutants=(
            "a_move_forgets_what_was_said", "a_move_does_not_wait_for_steps",
            "what_moves_is_called_off", "who_drains_too_long_keeps_its_work",
        ),
    ),
    Drill(
        "states-move", ("F55", "F63"), topology="1e2pd", work=LONG,
        settings=replace(SLOWER, has_state=True), faults=ASKED, from_s=1.2, to_s=1.6,
        fires=(*MOVED, "state_moved"), mutants=("a_state_is_not_sent",),
    ),
    Drill(
        "windows-move", ("F55", "F28"), topology="1e2pd", work=LOOKS_BACK,
        settings=replace(SLOWER, window=10), faults=ASKED, from_s=1.2, to_s=1.6,
        fires=(*MOVED, "slides"), mutants=("a_move_forgets_what_was_said",),
        calm={"settings.window": 1024},
    ),
    Drill(
        "groups-move", ("F55", "F29"), topology="1e2pd:tp2", work=LONG, settings=SLOWER,
        faults=ASKED, from_s=1.2, to_s=1.6, fires=MOVED,
        mutants=("a_move_does_not_wait_for_steps",),
    ),
    Drill(
        "who-hands-over-dies", ("F55", "F20"), topology="1e2pd", work=LONG, settings=SLOWER,
        faults=(*ASKED, Fault("kill", "pd0", point="REQUEST:ARRIVED>TRANSFERRING", nth=4)),
        from_s=1.2, to_s=1.6, fires=(*MOVED, "GENERATION:MIGRATING>PLACED"),
        mutants=("a_lost_attempt_is_an_error",),
    ),
    Drill(
        "who-takes-over-dies", ("F55", "F20"), topology="1e3pd", work=LONG, settings=SLOWER,
        faults=(
            *ASKED,
            Fault("kill", "here", point="REQUEST:ARRIVED>WAITING_FOR_REMOTE_KV", duration_s=0.3),
        ),
        from_s=1.2, to_s=1.6, fires=(*MOVED, "GENERATION:MIGRATING>PLACED"),
        mutants=("a_lost_attempt_is_an_error",),
    ),
    Drill(
        "moves-over-a-lossy-bus", ("F55", "F16"), topology="1e2pd", work=LONG, settings=SLOWER,
        network=Conditions(loss=0.03, duplication=0.03), faults=ASKED, from_s=1.2, to_s=1.6,
        may_fail=Excuse(frozenset({"lost", "deadline", "unavailable"}), refusals=True),
        why="four attempts can each lose a message that only the next attempt repeats",
        fires=(*MOVED, "lost", "duplicated"), mutants=("copies_of_tokens_are_news",),
        calm={"network": Conditions()},
    ),
    Drill(
        "drain-while-the-gateway-dies", ("F55",), topology="1e2pd", work=STREAMS, settings=SLOW,
        faults=(
            Fault("ask_drain", "pd0", duration_s=0.4),
            Fault("kill", "gateway", point="INSTANCE:HEALTHY>DRAINING", duration_s=0.3),
        ),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        from_s=1.2, to_s=1.8,
    ),
    Drill(
        "rollout", ("F55",), topology="2e2p2d",
        work=Workload(60, spread_s=7.0, max_tokens=64), settings=SOON,
        faults=(Fault("roll_out", "all", duration_s=0.1, factor=1.2),), from_s=1.2, to_s=1.4,
        fires=MOVED, mutants=("a_move_forgets_what_was_said",),
    ),
    Drill(
        "roles-under-load", ("F55",), topology="2e2pd", work=LONG, settings=SLOWER,
        faults=(
            Fault("ask_drain", "e1", duration_s=0.1, call="prefill,decode"),
            Fault("ask_drain", "pd0", duration_s=0.1, call="encode"),
        ),
        from_s=1.2, to_s=1.6, fires=("switched",),
        mutants=("other_roles_are_forgotten",),
    ),
    Drill(
        "roles-by-backlog", ("F55",), topology="1e3pd",
        work=Workload(
            28, spread_s=2.0, image_share=1.0, max_images=1, num_images=400, max_tokens=8
        ),
        settings=Settings(
            costs=Costs(encode_per_patch_s=0.03), autoscale="roles", num_blocks=256,
            timing=replace_timing(
                lost_after_s=1.2, request_timeout_s=120.0, first_token_timeout_s=120.0
            ),
        ),
        fires=("switched",), calm={"settings.autoscale": "off"},
    ),
    Drill(
        "roles-cannot-be-loaded", ("F55",), topology="1e2pd", work=LONG, settings=SLOWER,
        faults=(
            Fault("raise", "pd0", call="load", factor=1.0),
            Fault("ask_drain", "pd0", duration_s=0.1, call="encode,prefill"),
        ),
        from_s=1.2, to_s=1.6, fires=("rolled_back",),
        mutants=("a_failed_switch_is_not_taken_back", "a_failed_switch_has_no_reason"),
    ),
    Drill(
        "killed-between-roles", ("F55",), topology="1e2pd", work=LONG, settings=SLOWER,
        faults=(
            Fault("ask_drain", "pd0", duration_s=0.1, call="encode,prefill"),
            Fault("kill", "pd0", point="INSTANCE:SWITCHING>LEFT", duration_s=0.3),
        ),
        from_s=1.2, to_s=1.6,
        mutants=("who_switches_keeps_its_work",),
    ),
    Drill(
        "roles-while-the-gateway-dies", ("F55",), topology="1e2pd", work=STREAMS, settings=SLOW,
        faults=(
            Fault("ask_drain", "pd0", duration_s=0.4, call="encode,prefill,decode"),
            Fault("kill", "gateway", point="INSTANCE:HEALTHY>SWITCHING", duration_s=0.3),
        ),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        from_s=1.2, to_s=1.8, fires=("switched",),
    ),
)
