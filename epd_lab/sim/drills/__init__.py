"""All drills, as data (`epd_lab.sim.drills.drill`)."""

from __future__ import annotations

from collections.abc import Iterator

from epd.config import EncodeConfig, Limits
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.adapters import ADAPTER_DRILLS
from epd_lab.sim.drills.admission import ADMISSION_DRILLS
from epd_lab.sim.drills.answers import ANSWER_DRILLS
from epd_lab.sim.drills.caches import CACHE_DRILLS
from epd_lab.sim.drills.drains import DRAIN_DRILLS
from epd_lab.sim.drills.drill import NOTHING, Drill
from epd_lab.sim.drills.elsewhere import ELSEWHERE_DRILLS
from epd_lab.sim.drills.faults import FAULT_DRILLS
from epd_lab.sim.drills.gateways import GATEWAY_DRILLS
from epd_lab.sim.drills.groups import GROUP_DRILLS
from epd_lab.sim.drills.kinds import KIND_DRILLS
from epd_lab.sim.drills.links import LINK_DRILLS
from epd_lab.sim.drills.lives import LIFE_DRILLS
from epd_lab.sim.drills.losses import LOSS_DRILLS
from epd_lab.sim.drills.pictures import PICTURE_DRILLS
from epd_lab.sim.drills.poison import POISON_DRILLS
from epd_lab.sim.drills.recovery import RECOVERY_DRILLS
from epd_lab.sim.drills.scheduling import SCHEDULING_DRILLS
from epd_lab.sim.drills.staged import STAGED_DRILLS
from epd_lab.sim.drills.states import STATE_DRILLS
from epd_lab.sim.drills.tiers import TIER_DRILLS
from epd_lab.sim.drills.wedges import WEDGE_DRILLS
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import UNEVEN, Workload

__all__ = ["DRILLS", "NOTHING", "NOT_REACHABLE", "Drill", "by_name", "naming"]


IMAGES = Workload(num_requests=12, image_share=1.0, spread_s=0.5)
MANY_IMAGES = Workload(num_requests=16, image_share=1.0, num_images=16, spread_s=0.5)
REPEATS = Workload(num_requests=60, image_share=1.0, num_images=2, spread_s=0.2)
HANG_UPS = Workload(28, num_images=20, cancel_share=0.7, spread_s=0.5)
SLOW_LINK = DataConditions(nbytes_per_s=2e4, jitter_s=0.02)

# fmt: off
DRILLS: tuple[Drill, ...] = (
    Drill(
        "quiet", (), work=Workload(24, spread_s=2.0), must_fire=0.0,
        mutants=(
            "acknowledged_rows_are_kept", "a_grant_waits_for_its_retry",
            "what_rests_counts_as_busy", "an_answer_stops_before_its_end",
            "a_handler_fails_when_its_work_is_done",
        ),
    ),
    Drill(
        "bytes-before-grant", ("F1", "F15"),
        work=Workload(12, image_share=1.0, num_images=30, spread_s=0.5),
        fires=("INCOMING:RetryDue",), mutants=("drop_parked_bytes",), topology="1e1p1d",
        faults=(
            Fault("block", "p0", point="MESSAGE:EncodeRequest", nth=6, other="e0", duration_s=0.4),
        ),
    ),
    Drill(
        "slow-bytes", ("F2", "F6", "F23"), work=IMAGES, data=SLOW_LINK, fires=("slow_write",),
        mutants=("publish_before_commit", "release_source_early"), calm={"data": DataConditions()},
    ),
    Drill(
        "small-pool", ("F3", "F4", "F18", "F23", "F24", "F31", "F39"), topology="2e1p1d",
        work=Workload(36, spread_s=0.02, image_share=1.0, num_images=36, grids=UNEVEN),
        fires=("EMBEDDING:RESIDENT>EVICTED", "encodes_deferred"),
        mutants=("evict_referenced_rows", "no_peer_has_a_quota"),
        calm={
            "settings.prefill.pool_nbytes": 1 << 16, "settings.encode.cache_device_nbytes": 1 << 16,
        },
    ),
    Drill(
        "cancel-mid-transfer", ("F6", "F21", "F22", "F42", "F43"), work=HANG_UPS, data=SLOW_LINK,
        fires=("INCOMING:RESERVED>CANCEL_PENDING", "EMBEDDING:LOADING>ABANDONED"),
        mutants=("cancel_frees_slots", "an_abort_is_confirmed_when_asked_again"),
        calm={"work.cancel_share": 0.0},
    ),
    Drill(
        "hang-up-storm", ("F6", "F43"), topology="1epd",
        work=Workload(60, spread_s=0.2, cancel_share=0.8, max_text=120, max_tokens=24),
        fires=("REQUEST:DECODING>ABORTING", "REQUEST:RUNNING>ABORTING"), must_fire=0.9,
        mutants=("abort_frees_blocks",), calm={"work.cancel_share": 0.0},
        settings=Settings(num_blocks=256),
    ),
    Drill(
        "one-bad-image", ("F13", "F14", "F37", "F40"), topology="1e1pd",
        work=Workload(16, image_share=1.0, num_images=24, broken_share=0.3, spread_s=0.05),
        fires=("ENCODING:QUEUED>FAILED", "ENCODING:ENCODING>FAILED"),
        mutants=("bad_image_fails_batch",), calm={"work.broken_share": 0.0},
    ),
    Drill(
        "out-of-memory", ("F13", "F14"), work=IMAGES,
        faults=(
            Fault("oom", "here", point="ENCODING:QUEUED>PREPARED", nth=4, factor=2),
            Fault("oom", "here", point="REQUEST:WAITING>RUNNING", nth=6, factor=1),
        ),
        may_fail=Excuse(frozenset({"engine"}), refusals=False),
        why="four attempts can meet the same exhausted device", engine_faults=True,
        fires=("REQUEST:StepFailed",), mutants=("a_failed_step_is_the_last",),
    ),
    Drill(
        "hung-encode", ("F15", "F21", "F22"), topology="1e1p1d",
        work=Workload(
            100, image_share=1.0, max_images=1, num_images=20, cancel_share=0.95, spread_s=1.4,
        ),
        faults=(Fault("hang", "here", point="ENCODING:PREPARED>ENCODING", nth=4, duration_s=2.0),),
        must_fire=0.7, fires=("ENCODING:ENCODING>ABANDONED", "ENCODING:ABANDONED>ENCODING"),
        calm={"work.cancel_share": 0.0}, mutants=("what_was_abandoned_stays_so",),
    ),
    Drill(
        "same-image", ("F10", "F32", "F37"), topology="2e2p1d", work=REPEATS, must_fire=0.7,
        fires=("EMBEDDING:LOADING>LOADING",), mutants=("no_single_flight", "deepstack_is_dropped"),
        calm={"work.num_images": 1 << 30},
    ),
    Drill(
        "lossy-bus", ("F16", "F17", "F20"), topology="2e2p2d",
        network=Conditions(loss=0.03, duplication=0.03),
        may_fail=Excuse(frozenset({"lost", "deadline", "unavailable"}), refusals=True),
        why="four attempts can each lose a message that only the next attempt repeats",
        fires=("lost", "duplicated", "GENERATION:MIGRATING>PLACED"), calm={"network": Conditions()},
        work=Workload(32, spread_s=1.5),
        mutants=("copies_of_tokens_are_news", "a_join_is_said_once", "an_image_is_offered_once"),
    ),
    Drill(
        "broken-connections", ("F16",), topology="1e1p1d",
        faults=(
            Fault("reset", "here", point="MESSAGE:Grant", nth=6, other="peer"),
            Fault("reset", "here", point="MESSAGE:Commit", nth=12, other="peer"),
            Fault("reset", "here", point="MESSAGE:CancelTransfer", nth=4, other="peer"),
        ),
        mutants=("no_commit_retry", "no_grant_retry", "open_rooms_are_not_told"),
        fires=("INCOMING:RetryDue",),
    ),
    Drill(
        "partition", ("F16", "F19", "F35"), topology="2e1p1d",
        faults=(
            Fault(
                "partition", "here", point="ENCODING:PREPARED>ENCODING", nth=4, other="gateway",
                duration_s=3.0,
            ),
        ),
        work=MANY_IMAGES, fires=("INSTANCE:SUSPECT>LOST", "expelled", "GENERATION:ImageMoved"),
        mutants=("a_lost_encoder_ends_the_attempt",),
    ),
    Drill(
        "restart-gateway", ("F17", "F35"), topology="2e2p2d",
        faults=(Fault("kill", "gateway", duration_s=0.4),),
        may_fail=Excuse(frozenset({"gateway"}), refusals=True),
        why="clients of a dead gateway see their connection break, or nobody there",
        mutants=(
            "new_registry_loses_the_absent", "a_new_gateway_does_not_wait",
            "a_silent_gateway_is_waited_for", "a_new_gateway_begins_late",
        ),
        work=Workload(40, spread_s=1.5),
        fires=(
            "GENERATION:QUEUED>AWAITING_TOPOLOGY", "LINK:PeerLost",
            "MEMBERSHIP:CUT_OFF>REJOINING",
        ),
    ),
    Drill(
        "two-hundred-at-once", ("F4", "F18", "F39"),
        work=Workload(200, spread_s=0.01, image_share=1.0, num_images=40, max_tokens=4),
        settings=Settings(
            limits=Limits(max_open_requests=48),
            encode=EncodeConfig(64, 64, cache_device_nbytes=2048),
        ),
        may_fail=Excuse(frozenset({"busy"}), refusals=True),
        why="admission is bounded: the rest is refused at once",
        fires=("GENERATION:RECEIVED>REJECTED",), calm={"work.num_requests": 20},
        mutants=("the_full_say_nothing",),
    ),
    Drill(
        "positions-travel", ("F12", "F26"), topology="1e1p1d",
        work=Workload(10, image_share=1.0, max_tokens=10), fires=("REQUEST:RemoteKvArrived",),
        calm={"topology": "1epd"},
        mutants=(
            "rope_delta_stays_home", "the_seed_starts_anew_at_decode",
            "decode_looks_back_at_its_own", "the_past_is_a_window", "penalties_stay_at_prefill",
            "the_bias_stays_at_prefill", "the_grammar_stays_at_prefill",
            "decode_ends_when_it_likes",
        ),
    ),
    Drill(
        "failed-writes", ("F6", "F8", "F14"), topology="2e1p1d", work=Workload(16),
        data=DataConditions(failed=0.3), may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a failed write",
        fires=("OUTGOING:WRITING>FAILED", "GENERATION:MIGRATING>PLACED"), calm={"data.failed": 0.0},
        mutants=(
            "a_refused_write_keeps_its_source", "the_next_attempt_goes_where_it_failed",
            "the_next_attempt_takes_its_time",
        ),
    ),
    Drill(
        "messages-of-an-attempt-before", ("F38", "F42"), topology="2e1p1d",
        work=Workload(16, image_share=1.0, spread_s=0.5), data=DataConditions(failed=0.1),
        network=Conditions(duplication=0.5, late_copy_s=0.1),
        may_fail=Excuse(frozenset({"transfer"}), refusals=False),
        why="four attempts can each meet a failed write",
        fires=("duplicated", "GENERATION:MIGRATING>PLACED"),
        calm={"data.failed": 0.0, "network.duplication": 0.0},
        mutants=(
            "a_message_of_the_last_attempt_ends_this_one", "what_was_aborted_is_forgotten",
            "rooms_are_forgotten_at_once", "an_abort_is_confirmed_once",
        ),
    ),
    *LOSS_DRILLS, *ELSEWHERE_DRILLS, *POISON_DRILLS, *CACHE_DRILLS, *RECOVERY_DRILLS, *LINK_DRILLS,
    *LIFE_DRILLS,
    *TIER_DRILLS, *SCHEDULING_DRILLS, *STAGED_DRILLS, *STATE_DRILLS, *ANSWER_DRILLS, *FAULT_DRILLS,
    *GROUP_DRILLS, *PICTURE_DRILLS, *KIND_DRILLS, *ADAPTER_DRILLS, *WEDGE_DRILLS, *ADMISSION_DRILLS,
    *DRAIN_DRILLS, *GATEWAY_DRILLS,
)  # fmt: skip
# fmt: on

NOT_REACHABLE: dict[str, str] = {
    "F5": "regions are allocated once and never deregistered; no call exists that could",
    "F9": "slots are numbers of one region; overlap cannot be expressed",
    "F11": "needs two builds with different contracts; tests/roles refuses them at the join",
    "F25": "captured graphs are not simulated; tests/gpu pads them",
    "F33": "validated by the HTTP API, which is not simulated",
    "F34": "HTTP, not simulated",
    "F36": "a busy wait stops virtual time: StepLimitReached in every drill",
    "F45": "the simulated storage has no file system; tests/transport",
    "F46": "images are names; tests/api and tests/engine refuse bad ones",
    "F47": "locks and pidfds are not simulated; a dead writer's card that writes on is (rdma)",
    "F50": "engine memory and its finalizers are not simulated",
    "F51": "HTTP, not simulated",
    "F52": "bodies are parsed by the HTTP API, which is not simulated",
}


def by_name(name: str) -> Drill:
    """Raises KeyError with the names that there are."""
    found = {drill.name: drill for drill in DRILLS}.get(name)
    if found is None:
        raise KeyError(f"no drill {name!r}; there are: {', '.join(d.name for d in DRILLS)}")
    return found


def naming(mutant: str) -> Iterator[Drill]:
    """The drills that must notice a mutant."""
    return (drill for drill in DRILLS if mutant in drill.mutants)
