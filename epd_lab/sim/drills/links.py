"""Drills of links that carry nothing: noticed by who waits, opened anew, or given up (F48)."""

from __future__ import annotations

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.drill import Drill, replace_timing
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

IMAGES = Workload(num_requests=30, image_share=1.0, num_images=30, spread_s=2.0)
ROOMY = msgspec.structs.replace(Settings().prefill, pool_nbytes=64 * Settings().prefill.slot_nbytes)
"""Slots that a peer may still write to stay its own while both live."""
NOBODY_IS_LOST = replace_timing(suspect_after_s=20.0, lost_after_s=30.0)
SLOW_CARD = DataConditions(kind="rdma", nbytes_per_s=1e3, jitter_s=0.05)

# fmt: off
LINK_DRILLS: tuple[Drill, ...] = (
    Drill(
        "mute-to-encode", ("F16", "F48"), topology="2e2p1d", work=IMAGES,
        faults=(Fault("mute", "p0", point="MESSAGE:Grant", nth=8, other="e0"),), must_fire=0.7,
        mutants=("no_link_is_doubted", "mute_links_are_given_up"),
        fires=("LINK:MUTE>CARRIES", "links_opened_anew"),
    ),
    Drill(
        "mute-from-encode", ("F16", "F48"), topology="2e1p1d", work=IMAGES,
        faults=(Fault("mute", "here", point="OUTGOING:PARKED>AWAITING_SLOTS", nth=8, other="p0"),),
        mutants=("no_link_is_doubted",), fires=("LINK:MUTE>CARRIES", "links_opened_anew"),
    ),
    Drill(
        "mute-with-nothing-to-repeat", ("F16", "F48"), topology="2e1p1d",
        work=Workload(20, image_share=1.0, num_images=20, broken_share=1.0, spread_s=2.0),
        faults=(Fault("mute", "here", point="ENCODING:QUEUED>FAILED", nth=6, other="p0"),),
        mutants=("only_the_own_direction_is_opened",),
        fires=("LINK:MUTE>CARRIES", "links_opened_anew"),
    ),
    Drill(
        "mute-to-decode", ("F16", "F20", "F48"), topology="1e1p2d",
        work=Workload(24, max_tokens=24, spread_s=1.5),
        faults=(
            Fault("mute", "p0", point="MESSAGE:KvOffer", nth=8, other="d0"),
            Fault(
                "mute", "here", point="REQUEST:WAITING_FOR_REMOTE_KV>DECODING", nth=8, other="p0",
            ),
        ),
        mutants=("no_link_is_doubted",), fires=("LINK:MUTE>CARRIES", "links_opened_anew"),
    ),
    Drill(
        "mute-to-the-gateway", ("F16", "F48"), topology="2e2p2d", work=Workload(24, spread_s=2.0),
        faults=(
            Fault("mute", "p0", point="MESSAGE:PrefillRequest", nth=8, other="gateway"),
            Fault("mute", "e0", point="MESSAGE:EncodeRequest", nth=8, other="gateway"),
        ),
        mutants=("no_link_is_doubted",),
        fires=("INSTANCE:SUSPECT>LOST", "links_opened_anew", "expelled"),
    ),
    Drill(
        "mute-from-the-gateway", ("F16", "F48"), topology="2e2p1d", work=Workload(24, spread_s=2.0),
        faults=(
            Fault("mute", "gateway", point="MESSAGE:PrefillRequest", nth=8, other="p0"),
            Fault("mute", "gateway", point="MESSAGE:EncodeRequest", nth=8, other="e0"),
            Fault("mute", "gateway", point="MESSAGE:Tokens", nth=8, other="d0"),
        ),
        mutants=("no_link_is_doubted",), fires=("LINK:MUTE>CARRIES", "links_opened_anew"),
    ),
    Drill(
        "mute-before-the-welcome", ("F16", "F17", "F48"), topology="2e1p1d",
        work=Workload(16, image_share=0.5, spread_s=2.0),
        faults=(
            Fault("mute", "here", point="MESSAGE:Join", nth=4, other="gateway"),
            Fault("mute", "gateway", point="MESSAGE:Welcome", nth=4, other="peer"),
        ),
        mutants=("who_joins_trusts_the_link",), fires=("links_opened_anew",),
    ),
    Drill(
        "mute-while-in-doubt", ("F8", "F48"), topology="1e2p2d",
        work=Workload(4, image_share=0.0, max_tokens=4, spread_s=0.1),
        data=DataConditions(kind="rdma", unknown=0.3, linger_s=2.0),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a write in doubt",
        faults=(Fault("mute", "p0", other="d0"), Fault("mute", "p1", other="d1")),
        mutants=("who_is_in_doubt_trusts_the_link",),
        fires=("INCOMING:DoubtReceived", "LINK:MUTE>CARRIES"), calm={"data.unknown": 0.0},
        from_s=1.5, to_s=1.9, must_fire=0.5,
    ),
    Drill(
        "lost-before-it-was-told-of", ("F7", "F35", "F65"), topology="1e1p1d",
        work=Workload(16, image_share=0.3, spread_s=1.0),
        faults=(
            Fault("mute", "gateway", point="MESSAGE:KvOffer", other="d0"),
            Fault("kill", "p0", point="MESSAGE:KvOffer", duration_s=0.1),
            Fault("kill", "here", point="OUTGOING:RetryDue", nth=6, duration_s=0.1),
        ),
        may_fail=Excuse(frozenset({"poison"}), refusals=False),
        why="both kills may hit one prompt that was in a step since the last heartbeat",
        mutants=("the_untold_are_fenced",),
        fires=("message_of_stranger", "INCOMING:QUARANTINED>FAILED"),
    ),
    Drill(
        "asked-before-it-was-told", ("F7", "F8", "F65"), topology="1e1p1d",
        work=Workload(24, image_share=1.0, num_images=24, spread_s=3.0),
        data=DataConditions(kind="rdma", unknown=0.5, linger_s=1.0),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a write in doubt",
        faults=(
            Fault("kill", "p0", duration_s=0.1),
            Fault("reset", "gateway", point="INSTANCE:EpochReplaced", other="e0"),
        ),
        settings=Settings(prefill=ROOMY), mutants=("the_untold_are_written_to",),
        fires=("message_of_stranger",), must_fire=0.6,
    ),
    Drill(
        "stall-until-given-up", ("F7", "F41", "F48"), topology="2e1p1d",
        work=Workload(24, image_share=1.0, num_images=24, spread_s=5.0), data=SLOW_CARD,
        faults=(
            Fault("stall", "e0", point="OUTGOING:PARKED>AWAITING_SLOTS", nth=8, duration_s=6.0),
        ),
        settings=Settings(timing=NOBODY_IS_LOST), mutants=("grace_frees_slots",),
        fires=(
            "INCOMING:EXPIRE_PENDING>QUARANTINED", "INCOMING:QUARANTINED>FAILED",
            "LINK:MUTE>UNREACHABLE",
        ),
    ),
    Drill(
        "apart-for-long", ("F16", "F48"), topology="2e2p1d", work=IMAGES,
        faults=(Fault("partition", "p0", other="e0", duration_s=45.0),),
        settings=Settings(prefill=ROOMY), mutants=("the_silent_are_waited_for",), to_s=1.5,
        fires=(
            "LINK:MUTE>UNREACHABLE", "INCOMING:EXPIRE_PENDING>QUARANTINED", "GENERATION:ImageMoved",
        ),
    ),
    Drill(
        "heard-after-it-was-forgotten", ("F48",), topology="1e2p1d",
        work=Workload(16, image_share=0.3, max_tokens=4),
        faults=(Fault("block", "d0", point="MESSAGE:Commit", nth=4, other="p0", duration_s=9.0),),
        settings=Settings(timing=replace_timing(tombstone_s=3.0)),
        mutants=("the_forgotten_is_not_acknowledged",), fires=("LINK:MUTE>UNREACHABLE",),
    ),
    Drill(
        "granted-after-it-was-forgotten", ("F42", "F43"), topology="1e1p1d",
        work=Workload(24, image_share=1.0, num_images=24, broken_share=0.5, spread_s=1.0),
        faults=(Fault("block", "p0", point="MESSAGE:Grant", nth=4, other="e0", duration_s=0.7),),
        settings=Settings(timing=replace_timing(tombstone_s=0.3), prefill=ROOMY),
        mutants=("grants_are_kept_until_their_deadline",), fires=("grants_not_asked_for",),
    ),
)  # fmt: skip
# fmt: on
