"""Drills of what nobody declares: calls that raise, bytes and disks that lie, threads that end,
messages of the dead, clocks that jump."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from epd.frontend import TimeLimits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.drills.links import ROOMY
from epd_lab.sim.drills.tiers import RING, SEEN_AGAIN, TIERS
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.storage import DiskConditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

IMAGES = Workload(num_requests=12, image_share=1.0, spread_s=0.5)
MANY_IMAGES = Workload(24, image_share=1.0, num_images=24, spread_s=1.5)
LONG_PROMPTS = Workload(16, image_share=0.3, max_text=120, max_tokens=8, spread_s=1.0)

READY = "ENCODING:ENCODING>RESIDENT"
BATCH = "ENCODING:PREPARED>ENCODING"
FIRST_STEP = "REQUEST:WAITING>RUNNING"
FIRST_DECODE = "REQUEST:WAITING_FOR_REMOTE_KV>DECODING"
PART = "OUTGOING:GRANTED>STREAMING"
END = "OUTGOING:STREAMING>WRITING"
ROWS = "OUTGOING:GRANTED>AWAITING_SLOTS"
HANDED_OVER = "REQUEST:RUNNING>TRANSFERRING"
IN_DOUBT = "OUTGOING:WRITING>QUARANTINED"

CARD = DataConditions(kind="rdma", nbytes_per_s=2e4, jitter_s=0.05)
BETWEEN_HOSTS = DataConditions(kind="rdma", unknown=0.3, linger_s=1.0, nbytes_per_s=2e5, asks=True)
SLOWLY_BETWEEN_HOSTS = DataConditions("rdma", nbytes_per_s=3e2, linger_s=4.0, asks=True)
SOON_LOST = replace_timing(suspect_after_s=0.6, lost_after_s=1.0)
SHORT_TOMBSTONES = replace_timing(tombstone_s=0.3)
ON_DISK = msgspec.structs.replace(
    TIERS, cache_device_nbytes=1, cache_host_nbytes=1, cache_disk_nbytes=1 << 20
)
NO_ANSWER = Excuse(frozenset({"transfer"}), refusals=False)
GATEWAY_DIES = Excuse(frozenset({"gateway"}), refusals=True)
DAY_S = 86400.0
ASKED = "MESSAGE:PrefillRequest"

# fmt: off
FAULT_DRILLS: tuple[Drill, ...] = (
    # --- calls that raise -------------------------------------------------------------------------
    Drill(
        "preparing-raises", ("F13", "F14"), work=MANY_IMAGES,
        faults=(
            Fault("raise", "e0", call="preprocess", factor=2),
            Fault("raise_late", "e0", call="preprocess", factor=2),
        ),
        fires=("raised preprocess", "raised late preprocess"),
        mutants=("a_raise_leaves_its_image_open",), to_s=1.4,
    ),
    Drill(
        "encoding-raises", ("F13", "F14"), work=MANY_IMAGES,
        faults=(
            Fault("raise", "e0", point=BATCH, nth=4, call="encode"),
            Fault("raise_late", "e0", point=BATCH, nth=4, call="encode"),
        ),
        fires=("raised encode", "raised late encode"), mutants=("a_raise_ends_the_batches",),
    ),
    Drill(
        "steps-raise", ("F13", "F14"), work=Workload(20, image_share=0.3, max_tokens=16),
        faults=(
            Fault("raise", "p0", point=FIRST_STEP, nth=6, call="step"),
            Fault("raise_late", "p0", point=FIRST_STEP, nth=6, call="step"),
            Fault("raise", "d0", point=FIRST_DECODE, nth=6, call="step"),
            Fault("raise_late", "d0", point=FIRST_DECODE, nth=6, call="step"),
        ),
        fires=("raised step", "raised late step"), mutants=("a_step_that_raises_never_ends",),
    ),
    Drill(
        "writes-raise", ("F6", "F8", "F14"), topology="2e1p1d", work=IMAGES, data=CARD,
        faults=(
            Fault("raise", "e0", point=READY, nth=3, call="write"),
            Fault("raise_late", "e1", point=READY, nth=3, call="write"),
            Fault("raise_late", "p0", point=PART, nth=2, call="write"),
        ),
        fires=("raised write", "raised late write"), may_fail=NO_ANSWER,
        why="four attempts can each meet a write that raises", mutants=("a_raise_is_a_refusal",),
    ),
    Drill(
        "staging-raises", ("F3", "F14"), topology="1e2p1d", work=MANY_IMAGES,
        settings=Settings(encode=RING),
        faults=(
            Fault("raise", "e0", point=READY, nth=4, call="copy_out"),
            Fault("raise_late", "e0", point=READY, nth=8, call="copy_out"),
            Fault("raise", "p0", point=PART, nth=2, call="fetch_kv"),
        ),
        fires=("raised copy_out", "raised late copy_out", "raised fetch_kv"),
        mutants=("staging_that_raises_is_not_told",),
    ),
    Drill(
        "a-cache-raises", ("F14", "F32"), topology="2e1p1d", work=SEEN_AGAIN,
        settings=Settings(encode=TIERS, placement="fixed"),
        faults=(
            Fault("raise", "e0", call="get", factor=2),
            Fault("raise_late", "e1", call="get", factor=2),
            Fault("raise", "e0", call="put", factor=2),
            Fault("raise", "e0", call="to_host", factor=2),
            Fault("raise_late", "e1", call="to_device"),
        ),
        fires=("raised get", "raised late get", "raised put", "raised to_host"),
        mutants=("a_read_that_raises_fails_the_image",), to_s=1.2,
    ),
    Drill(
        "sums-raise", ("F14", "F54"), topology="2e1p1d", work=IMAGES,
        faults=(
            Fault("raise", "p0", point=ROWS, nth=3, call="checksum"),
            Fault("raise", "d0", point=HANDED_OVER, nth=3, call="checksum"),
        ),
        fires=("raised checksum",), mutants=("what_cannot_be_summed_is_right",),
    ),
    # --- doubts that nobody can end ---------------------------------------------------------------
    Drill(
        "settle-asks-the-dead", ("F7", "F8", "F20"), topology="2e2p1d", work=IMAGES,
        data=BETWEEN_HOSTS, faults=(Fault("kill", "peer", point=IN_DOUBT, nth=2, duration_s=0.3),),
        fires=("settle unanswered",), may_fail=NO_ANSWER,
        why="four attempts can each meet a write whose outcome is unknown",
        mutants=("doubts_about_the_dead_stay",),
    ),
    Drill(
        "settle-asks-in-vain", ("F7", "F8"), topology="2e2p1d", work=IMAGES, data=BETWEEN_HOSTS,
        faults=(
            Fault("stall", "p0", point=IN_DOUBT, nth=2, duration_s=1.5),
            Fault("slow", "p1", point=IN_DOUBT, nth=2, duration_s=2.0, factor=8.0),
            Fault("raise_late", "here", point=IN_DOUBT, nth=3, call="settle", factor=2),
        ),
        fires=("settle unanswered", "raised late settle"), may_fail=NO_ANSWER,
        why="four attempts can each meet a write whose outcome is unknown",
        mutants=("no_answer_settles", "a_settle_that_raises_has_settled"),
    ),
    Drill(
        "a-later-life-attests", ("F7", "F19", "F44"), topology="2e1p1d",
        work=Workload(num_requests=8, image_share=1.0, num_images=8, spread_s=0.5),
        data=SLOWLY_BETWEEN_HOSTS, settings=Settings(timing=SOON_LOST),
        faults=(Fault("kill", "e0", duration_s=3.0),),
        fires=("fence not attested", "INSTANCE:SUSPECT>LOST", "INCOMING:QUARANTINED>FAILED"),
        mutants=("the_end_of_a_process_is_the_end_of_its_bytes", "a_fence_is_asked_for_once"),
        from_s=1.3, to_s=1.8,
    ),
    # --- bytes and disks --------------------------------------------------------------------------
    Drill(
        "kv-changes-in-flight", ("F54",), work=LONG_PROMPTS,
        faults=(
            Fault("corrupt", "here", point=PART, nth=3, call="part"),
            Fault("corrupt", "here", point=END, nth=3, call="end"),
        ),
        fires=("corrupted part", "corrupted end"),
        mutants=("only_the_first_part_is_summed", "the_last_part_is_not_summed"),
    ),
    Drill(
        "a-transport-finds-changed-bytes", ("F54",), topology="2e1p1d", work=IMAGES,
        data=DataConditions(kind="rdma", corrupt=0.15, own_check=True), may_fail=NO_ANSWER,
        why="four attempts can each meet bytes that are not those that were sent",
        fires=("corruption refused",), calm={"data.corrupt": 0.0},
        mutants=("a_refused_write_is_committed",),
    ),
    Drill(
        "a-disk-lies", ("F12", "F32", "F38"), topology="2e1p1d",
        work=replace(SEEN_AGAIN, num_requests=40),
        settings=Settings(
            encode=ON_DISK, disk=DiskConditions(undurable=0.3, stale=0.2, mixed=0.15, flipped=0.3),
        ),
        fires=("disk undurable", "disk stale", "disk mixed", "disk flipped"),
        calm={"settings.disk": DiskConditions()},
        mutants=(
            "what_was_stored_is_not_encoded_again", "any_build_wrote_this_file",
            "files_are_not_summed",
        ),
    ),
    # --- threads ----------------------------------------------------------------------------------
    Drill(
        "a-launch-thread-dies", ("F14", "F49"), topology="1e1p1d",
        faults=(Fault("lose_thread", "here", point=FIRST_STEP, nth=6),), fires=("device_lost",),
        mutants=("a_dead_thread_leaves_its_futures",), engine_faults=True,
    ),
    Drill(
        "a-pool-thread-dies", ("F14", "F49"), work=IMAGES,
        faults=(Fault("lose_thread", "e0", point=BATCH, nth=4, call="pool"),),
        fires=("device_lost",), mutants=("a_dead_thread_leaves_its_futures",), engine_faults=True,
    ),
    # --- messages of the dead ---------------------------------------------------------------------
    Drill(
        "messages-of-a-former-encoder", ("F44", "F55", "F58"), topology="1e1p1d",
        work=Workload(24, image_share=1.0, num_images=24, spread_s=3.0),
        faults=(
            Fault("haunt", "e0", point=READY, factor=0.02, call="Heartbeat"),
            Fault("drain", "e0", point=READY),
        ),
        fires=("former Heartbeat",), mutants=("messages_count_whoever_said_them",),
    ),
    Drill(
        "messages-of-a-former-prefill", ("F20", "F44", "F58"), topology="1e2p2d",
        work=Workload(60, image_share=0.5, num_images=60, spread_s=4.0),
        settings=Settings(timing=SHORT_TOMBSTONES, placement="fixed"),
        faults=(Fault("haunt", "p0", duration_s=0.4, factor=1.0),), fires=("former KvOffer",),
        must_fire=0.7,
    ),
    Drill(
        "messages-of-a-former-decode", ("F20", "F44", "F58"), topology="1e1p2d",
        work=Workload(60, max_tokens=24, spread_s=4.0), settings=Settings(timing=SHORT_TOMBSTONES),
        faults=(Fault("haunt", "d0", duration_s=0.7, factor=1.0),), fires=("former Grant",),
    ),
    Drill(
        "messages-of-a-former-gateway", ("F35", "F44", "F58"), topology="2e1p2d",
        work=Workload(32, spread_s=6.0),
        faults=(
            Fault("haunt", "gateway", duration_s=0.8, factor=3.0, other="p0"),
            Fault("kill", "p0", duration_s=0.3),
        ),
        fires=("former Membership",), may_fail=GATEWAY_DIES,
        why="clients of a dead gateway see their connection break, or nobody there",
        mutants=("a_former_gateway_is_believed",), to_s=1.3,
    ),
    Drill(
        "a-successor-is-heard-but-not-its-welcome", ("F35", "F44", "F58"), topology="1e2p2d",
        work=Workload(16, image_share=0.5, spread_s=5.0), network=Conditions(loss=0.1),
        settings=Settings(timing=replace_timing(accept_timeout_s=0.4)),
        faults=(
            Fault("haunt", "gateway", duration_s=2.8, factor=0.1),
            Fault("kill", "e0", duration_s=0.3),
        ),
        fires=("former Membership",),
        may_fail=Excuse(frozenset({"gateway", "lost", "deadline", "unavailable"}), refusals=True),
        why="clients of a dead gateway see their connection break; attempts lose messages",
        mutants=("numbers_of_two_registries_are_compared",), to_s=1.2,
    ),
    Drill(
        "grants-of-the-lost", ("F42", "F44", "F58"), topology="1e2p1d",
        work=Workload(40, image_share=1.0, num_images=40, spread_s=4.0),
        settings=Settings(timing=SHORT_TOMBSTONES),
        faults=(Fault("haunt", "p0", duration_s=0.4, factor=1.0, call="Grant"),),
        fires=("former Grant",), to_s=1.5,
    ),
    Drill(
        "near-and-far", ("F6", "F7"), topology="1e2p1d",
        work=Workload(30, image_share=0.3, max_images=1, spread_s=0.3, cancel_share=0.5),
        data=DataConditions(nbytes_per_s=2e4, jitter_s=0.05),
        settings=Settings(num_landing_blocks=12, near=("p0", "d0"), timing=SOON_LOST),
        faults=(Fault("stall", "p0", point=PART, duration_s=4.0),),
        fires=("near_write", "kv_waited_to_land", "INCOMING:QUARANTINED>FAILED"), must_fire=0.8,
        calm={"settings.num_landing_blocks": 0, "settings.near": (), "work.cancel_share": 0.0},
        mutants=(
            "a_near_pool_is_taken_for_landing_blocks", "cancel_frees_slots", "lost_peer_frees_slots"
        ),
    ),
    Drill(
        "late-for-a-new-gateway", ("F7", "F8", "F35"),
        work=Workload(num_requests=16, image_share=1.0, num_images=16, spread_s=0.3),
        data=DataConditions(kind="rdma", unknown=0.6, linger_s=7.0),
        settings=Settings(prefill=ROOMY, timing=SOON_LOST),
        faults=(
            Fault("partition", "e0", point=IN_DOUBT, other="gateway", duration_s=6.5),
            Fault("kill", "gateway", point=IN_DOUBT, nth=3, duration_s=0.1),
        ),
        fires=("expelled",), calm={"data.unknown": 0.0},
        may_fail=Excuse(frozenset({"gateway", "transfer", "deadline", "unavailable"}), True),
        why="clients of a dead gateway see their connection break; there is no other encoder",
        mutants=("who_comes_late_is_welcome",),
    ),
    # --- clocks -----------------------------------------------------------------------------------
    Drill(
        "a-clock-jumps-ahead", ("F15", "F57"), topology="1e1p1d",
        work=Workload(24, spread_s=1.5, max_tokens=24),
        faults=(
            Fault("jump", "e0", factor=DAY_S), Fault("jump", "p0", factor=DAY_S),
            Fault("jump", "d0", factor=-DAY_S),
        ),
        fires=("jump",), mutants=("deadlines_are_of_the_wall_clock",),
    ),
    Drill(
        "all-clocks-jump", ("F15", "F57"), topology="1e1p1d",
        work=Workload(24, spread_s=1.5, max_tokens=24),
        faults=(
            Fault("jump", "all", point="MESSAGE:PrefillRequest", nth=8, factor=DAY_S),
            Fault("jump", "all", point="MESSAGE:KvOffer", nth=8, factor=DAY_S),
            Fault("jump", "all", factor=-DAY_S),
        ),
        fires=("jump",), mutants=("deadlines_are_of_the_wall_clock",),
    ),
    Drill(
        "the-machine-sleeps", ("F15", "F57"), topology="2e1p1d",
        work=Workload(24, spread_s=1.0, max_tokens=24, limits=TimeLimits(25.0, 25.0, 25.0)),
        faults=(Fault("jump", "all", factor=8.0), Fault("sleep", "all", duration_s=8.0)),
        fires=("sleep",), mutants=("who_slept_takes_all_for_lost",),
    ),
    Drill(
        "hosts-have-other-clocks", ("F15", "F57"), topology="2e2p2d",
        work=Workload(24, spread_s=2.5, max_tokens=24, limits=TimeLimits(8.0, 8.0, 8.0)),
        faults=(
            *(Fault("jump", name, point=ASKED, factor=9.0) for name in ("e0", "p0", "d0")),
            *(Fault("jump", name, point=ASKED, factor=-9.0) for name in ("e1", "p1")),
            *(Fault("kill", name, duration_s=0.2) for name in ("e0", "p0", "d0")),
            Fault("drift", "d1", point=ASKED, factor=1.03),
            Fault("drift", "p1", point=ASKED, factor=0.97),
        ),
        mutants=("the_welcome_brings_no_time",), from_s=1.5, to_s=2.5,
    ),
    Drill(
        "a-clock-is-far-off", ("F57",), topology="1e1p2d", work=Workload(16, spread_s=2.0),
        settings=Settings(timing=replace_timing(max_clock_skew_s=60.0)),
        faults=(
            Fault("jump", "d0", point=ASKED, factor=DAY_S, duration_s=2.5),
            Fault("kill", "d0", duration_s=0.2),
        ),
        fires=("MEMBERSHIP:JOINING>REJECTED",), mutants=("whatever_the_clock_it_is_welcome",),
        from_s=1.5, to_s=2.5,
    ),
)
# fmt: on
