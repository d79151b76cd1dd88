"""Drills of who holds which rows: one encode per image in the cluster, and the cache events."""

from __future__ import annotations

from epd.config import EncodeConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.workload import Workload

TURNOVER = Workload(24, image_share=1.0, num_images=40, spread_s=1.5)  # more than caches hold

# fmt: off
CACHE_DRILLS: tuple[Drill, ...] = (
    Drill(
        "either-encodes", ("F20", "F43"), topology="1ep1ed",
        work=Workload(30, image_share=0.9, num_images=30, spread_s=0.5, cancel_share=0.2),
        faults=(Fault("kill", "ed0", point="ENCODING:PREPARED>ENCODING", nth=3, duration_s=0.5),),
        fires=("GENERATION:AWAITING_TOPOLOGY>PLACED",),
        mutants=("what_is_over_stays_in_the_books",),
    ),
    Drill(
        "same-image-everywhere", ("F37",), topology="3e1p1d",
        work=Workload(30, image_share=1.0, num_images=5, spread_s=0.05),
        fires=("EMBEDDING:LOADING>LOADING", "ENCODING:QUEUED>QUEUED"),
        mutants=("placement_forgets_flights",), calm={"work.num_images": 1 << 30}, must_fire=0.7,
    ),
    Drill(
        "cache-events-lost", ("F16",), topology="2e1p1d", work=TURNOVER,
        faults=(Fault("reset", "here", point="MESSAGE:CacheEvents", nth=16, other="gateway"),),
        mutants=("cache_gap_is_ignored",), fires=("cache_events_missed",),
    ),
    Drill(
        "cache-events-repeated", ("F16",), topology="2e1p1d",
        work=Workload(50, image_share=1.0, num_images=8, spread_s=2.0),
        network=Conditions(duplication=0.5, late_copy_s=1.0),
        settings=Settings(encode=EncodeConfig(64, 64, cache_device_nbytes=256)),
        fires=("duplicated",),
        mutants=("cache_events_apply_twice",), calm={"network.duplication": 0.0},
    ),
    Drill(
        "cache-of-the-dead", ("F44",), topology="2e1p1d", work=TURNOVER,
        faults=(Fault("kill", "here", point="ENCODING:ENCODING>RESIDENT", nth=24, duration_s=0.3),),
        mutants=("residency_survives_restart",),
        fires=("GENERATION:ImageMoved", "INSTANCE:EpochReplaced"),
    ),
)
# fmt: on
