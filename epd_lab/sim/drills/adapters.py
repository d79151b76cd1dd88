"""Drills of adapters that come and go while others are asked for."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epd.config import LoraConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.faults import Fault
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

ENGINE = msgspec.structs.replace(
    Settings().engine, lora=LoraConfig(enabled=True, max_loras=2, runtime_dir="/adapters")
)
SLOW = Costs(step_base_s=0.01)  # answers are open when an adapter goes
COMES_AND_GOES = Settings(num_blocks=256, engine=ENGINE, adapters=("poet",), costs=SLOW)
LATER = replace_timing(drain_timeout_s=20.0)
"""Open requests have their time."""
SOONER = replace_timing(drain_timeout_s=0.02)
LOAD = Fault("adapter", "gateway", call="pirate=pirate-1")
LOAD_FOR_A_WHILE = replace(LOAD, duration_s=1.0)
ASKED = Workload(
    48, start_s=1.0, image_share=0.2, num_texts=2, max_text=60, max_tokens=60, spread_s=3.0,
    adapters=("pirate", "pirate", "poet"),
)  # fmt: skip

# fmt: off
ADAPTER_DRILLS: tuple[Drill, ...] = (
    Drill(
        "adapter-comes-under-load", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD, Fault("kill", "d0", duration_s=0.4, point="ADAPTER:NAMED>LOADING"),
            Fault("slow", "p1", duration_s=2.0, factor=8.0, point="ADAPTER:NAMED>LOADING"),
        ),
        settings=COMES_AND_GOES, fires=("ADAPTER:LOADING>SERVING",),
        mutants=("offered_before_all_hold_it",),
    ),
    Drill(
        "adapter-comes-to-groups", ("F29", "F53"), topology="1e1p:tp2,2d:tp2", work=ASKED,
        faults=(
            LOAD, Fault("slow", "p0.1", duration_s=2.0, factor=8.0, point="ADAPTER:NAMED>LOADING"),
            Fault("kill", "d0.1", duration_s=0.4, point="ADAPTER:NAMED>LOADING"),
        ),
        settings=COMES_AND_GOES, fires=("ADAPTER:LOADING>SERVING", "group_lost"),
        mutants=("a_leader_alone_holds_adapters",),
    ),
    Drill(
        "late-joiner-gets-the-adapters", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD, Fault("kill", "p0", duration_s=0.3, point="ADAPTER:LOADING>SERVING"),
            Fault("kill", "d1", duration_s=0.6, point="ADAPTER:LOADING>SERVING"),
        ),
        settings=COMES_AND_GOES, fires=("ADAPTER:LOADING>SERVING",),
        mutants=("who_joins_late_has_no_list",),
    ),
    Drill(
        "new-gateway-goes-on-with-adapters", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD, Fault("kill", "gateway", duration_s=0.4, point="ADAPTER:LOADING>SERVING"),
            Fault("kill", "p0", duration_s=0.6, point="ADAPTER:LOADING>SERVING"),
        ),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        settings=COMES_AND_GOES, fires=("ADAPTER:LOADING>SERVING", "LINK:PeerLost"),
        mutants=("a_new_gateway_has_the_start_alone",),
    ),
    Drill(
        "adapter-leaves-with-requests", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD_FOR_A_WHILE, replace(LOAD, call="pirate=pirate-2", point="ADAPTER:REMOVING>GONE"),
        ),
        settings=replace(COMES_AND_GOES, timing=LATER),
        fires=("ADAPTER:LastRequestEnded", "ADAPTER:REMOVING>GONE"),
        mutants=("an_unload_does_not_wait", "keys_say_nothing_of_the_adapter"),
    ),
    Drill(
        "adapter-leaves-in-time", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(LOAD_FOR_A_WHILE,), settings=replace(COMES_AND_GOES, timing=SOONER),
        may_fail=Excuse(frozenset({"unavailable"}), refusals=False),
        why="requests that are open when their adapter's time is over end with a sentence",
        must_fire=0.7, fires=("ADAPTER:RETIRING>REMOVING", "ADAPTER:TimedOut"),
        mutants=("an_adapter_goes_under_its_requests",),
    ),
    Drill(
        "adapter-that-one-cannot-hold", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD, Fault("spoil", "d1", call="pirate-1", point="ADAPTER:NAMED>LOADING"),
        ),
        settings=COMES_AND_GOES, fires=("ADAPTER:LoadRefused", "ADAPTER:REMOVING>GONE"),
        mutants=("a_failed_load_is_not_taken_back",),
    ),
    Drill(
        "adapter-change-raises", ("F53",), topology="1e2p2d", work=ASKED,
        faults=(
            LOAD_FOR_A_WHILE,
            Fault("raise", "d0", call="hold_adapters", point="ADAPTER:RETIRING>REMOVING"),
            replace(LOAD, call="clown=clown-1", point="ADAPTER:REMOVING>GONE"),
        ),
        settings=replace(COMES_AND_GOES, timing=LATER),
        fires=("raised hold_adapters", "ADAPTER:REMOVING>GONE"),
        mutants=("a_list_that_raised_counts_as_taken",),
    ),
)
# fmt: on
