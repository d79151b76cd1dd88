"""Drills of an encoder's memory: the tiers of its cache, the disk that encoders share, its send
ring, and the receive pool that its rows arrive in."""

from __future__ import annotations

import msgspec

from epd.config import EncodeConfig
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.engine import golden
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.storage import DiskConditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.workload import Workload

SLOT_NBYTES = 4 * golden.ROW_NBYTES
TIERS = EncodeConfig(
    max_queue=64, max_batch_patches=64, cache_device_nbytes=640, cache_host_nbytes=640,
    cache_dir="simulated", cache_disk_nbytes=8192, cache_load_timeout_s=0.3,
)  # fmt: skip
MEMORY_ONLY = msgspec.structs.replace(TIERS, cache_dir="")
RING = msgspec.structs.replace(
    MEMORY_ONLY, send_buffer_nbytes=5 * SLOT_NBYTES, send_slot_nbytes=SLOT_NBYTES
)
SMALL_RING = msgspec.structs.replace(RING, send_buffer_nbytes=3 * SLOT_NBYTES)

SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)
CARD = DataConditions(kind="rdma", nbytes_per_s=2e4, jitter_s=0.05)
PATIENT = replace_timing(request_timeout_s=3.0, suspect_after_s=20.0, lost_after_s=30.0)
SEEN_AGAIN = Workload(24, image_share=1.0, num_images=8, spread_s=1.5)

# fmt: off
TIER_DRILLS: tuple[Drill, ...] = (
    Drill(
        "cache-tiers", ("F12", "F31", "F37"), topology="1e1p1d", work=SEEN_AGAIN,
        settings=Settings(encode=MEMORY_ONLY), fires=("ENCODING:PROMOTING>RESIDENT",),
        mutants=("a_copy_is_half_a_value", "rows_above_the_budget_stay"),
        calm={"settings.encode.cache_device_nbytes": 1 << 20},
    ),
    Drill(
        "restart-finds-rows", ("F19", "F32", "F37"), topology="2e1p1d",
        work=Workload(24, image_share=1.0, num_images=16), settings=Settings(encode=TIERS),
        faults=(
            Fault("kill", "e0", point="ENCODING:ENCODING>RESIDENT", nth=12, duration_s=0.3),
            Fault("kill", "e1", point="ENCODING:ENCODING>RESIDENT", nth=12, duration_s=0.5),
        ),
        fires=("ENCODING:LOADING>DEMOTED", "GENERATION:ImageMoved"),
        mutants=("each_reader_loads_for_itself",), calm={"settings.encode": Settings().encode},
    ),
    Drill(
        "sick-disk", ("F12", "F32", "F38"), topology="2e1p1d",
        work=Workload(48, image_share=1.0, num_images=12, spread_s=1.5),
        settings=Settings(
            encode=msgspec.structs.replace(TIERS, cache_device_nbytes=1, cache_host_nbytes=1),
            disk=DiskConditions(torn=0.2, rotten=0.2, mixed=0.2, lost=0.1, full=0.1),
        ),
        fires=("disk torn", "disk rotten", "disk mixed", "disk full"),
        mutants=("torn_files_are_believed", "any_file_is_the_right_one"),
        calm={"settings.disk": DiskConditions()},
    ),
    Drill(
        "slow-disk", ("F4", "F15", "F32"), work=SEEN_AGAIN,
        settings=Settings(
            encode=msgspec.structs.replace(TIERS, cache_device_nbytes=1, cache_host_nbytes=1),
            disk=DiskConditions(slow=0.4, slow_s=4.0), timing=PATIENT,
        ),
        fires=("ENCODING:LoadTimedOut",), mutants=("a_load_is_waited_for",),
        calm={"settings.disk": DiskConditions()},
    ),
    Drill(
        "rows-without-an-encoder", ("F32", "F38"), topology="2p1d", work=SEEN_AGAIN,
        settings=Settings(encode=TIERS, disk_knows_all=True), fires=("ENCODING:LOADING>DEMOTED",),
        mutants=("images_need_an_encoder",), calm={"topology": "1e2p1d", "settings": Settings()},
    ),
    Drill(
        "sick-storage-and-an-encoder", ("F12", "F32", "F38", "F40"), topology="1e2pd",
        work=SEEN_AGAIN,
        settings=Settings(
            encode=msgspec.structs.replace(TIERS, cache_device_nbytes=1, cache_host_nbytes=1),
            disk=DiskConditions(torn=0.3, rotten=0.2, mixed=0.5, lost=0.3), disk_knows_all=True,
        ),
        fires=("disk torn", "disk rotten", "disk mixed", "disk lost"),
        mutants=(
            "any_file_is_the_right_one", "torn_files_are_believed", "storage_is_asked_for_ever",
            "absent_rows_are_zeros",
        ),
        calm={"settings.disk": DiskConditions(), "settings.encode.cache_disk_nbytes": 1 << 20},
    ),
    Drill(
        "encoder-runs-ahead", ("F4", "F24"), topology="2e1p1d",
        work=Workload(30, spread_s=0.05, image_share=1.0, num_images=30),
        settings=Settings(encode=msgspec.structs.replace(MEMORY_ONLY, cache_device_nbytes=256)),
        fires=("encodes_deferred",),
        mutants=(
            "grants_do_not_overtake", "run_ahead_is_never_given_back",
            "an_encoder_runs_ahead_for_ever",
        ),
        calm={"settings.encode.cache_device_nbytes": 1 << 20},
    ),
    Drill(
        "few-pixels-at-a-time", ("F4",), topology="2e1p1d",
        work=Workload(30, spread_s=0.05, image_share=1.0, num_images=30, cancel_share=0.2),
        settings=Settings(
            encode=msgspec.structs.replace(
                MEMORY_ONLY, cache_device_nbytes=1 << 20, pixels_nbytes=100
            ),
        ),
        fires=("encodes_deferred",),
        mutants=("pixels_are_never_given_back", "any_number_of_pixels_is_held"),
        calm={"settings.encode.pixels_nbytes": 1 << 20},
    ),
    Drill(
        "leave-before-the-turn", ("F4", "F43"), topology="2e1p1d",
        work=Workload(40, spread_s=0.05, image_share=1.0, num_images=40, cancel_share=0.6),
        settings=Settings(encode=msgspec.structs.replace(MEMORY_ONLY, cache_device_nbytes=256)),
        fires=("ENCODING:DEFERRED>EVICTED",), mutants=("who_has_left_waits_for_its_turn",),
        calm={"settings.encode.cache_device_nbytes": 1 << 20},
    ),
    Drill(
        "small-send-ring", ("F3", "F4", "F18"), topology="1e2p1d",
        work=Workload(20, spread_s=0.02, image_share=1.0, num_images=20), data=SLOW_LINK,
        settings=Settings(encode=RING), fires=("send_ring_deferred",),
        mutants=(
            "a_lease_of_the_ring_is_not_told", "ring_slots_return_early",
            "a_full_ring_fails_the_send", "messages_wait_for_the_ring",
        ),
        calm={"settings.encode.send_buffer_nbytes": 1 << 16},
    ),
    Drill(
        "oversized-for-the-ring", ("F3", "F4"), topology="1e1p1d",
        work=Workload(16, spread_s=0.3, image_share=1.0, num_images=8),
        settings=Settings(encode=SMALL_RING), fires=("send_ring_oversized",),
        mutants=("oversized_waits_for_the_ring",),
        calm={"settings.encode.send_buffer_nbytes": 1 << 16},
    ),
    Drill(
        "cancel-in-the-ring", ("F3", "F42", "F43"), topology="1e2p1d",
        work=Workload(20, spread_s=0.1, image_share=1.0, num_images=20, cancel_share=0.7),
        data=SLOW_LINK, settings=Settings(encode=RING),
        fires=("OUTGOING:AWAITING_SLOTS>CANCELLED", "INCOMING:RESERVED>CANCEL_PENDING"),
        mutants=("ring_slots_never_return",),
        calm={"work.cancel_share": 0.0, "settings.encode.send_buffer_nbytes": 1 << 16},
    ),
    Drill(
        "kill-receiver-of-the-ring", ("F3", "F8", "F20"), topology="1e2p1d",
        work=Workload(16, spread_s=0.3, image_share=1.0, num_images=20), data=CARD,
        settings=Settings(encode=RING),
        faults=(
            Fault("kill", "peer", point="OUTGOING:PARKED>AWAITING_SLOTS", nth=6, duration_s=0.4),
        ),
        fires=("INCOMING:PeerFenced", "GENERATION:MIGRATING>PLACED", "INSTANCE:EpochReplaced"),
        mutants=("a_refused_write_keeps_its_source", "ring_slots_never_return"),
    ),
)
# fmt: on
