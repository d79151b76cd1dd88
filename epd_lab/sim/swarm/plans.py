"""Swarm: topology, workload, conditions and faults drawn per seed; nobody chose the combination.

What may fail is derived from what was drawn (`excuse`): a request may fail only for a reason that
one of the plan's own faults gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from epd.config import EncodeConfig, EngineConfig, SpeculativeConfig
from epd_lab.sim.client import Record
from epd_lab.sim.cluster import GATEWAY, Settings, parse_topology
from epd_lab.sim.core.breaks import CALLS
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.engine import golden
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.storage import DiskConditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import Plan
from epd_lab.sim.swarm import operations, times
from epd_lab.sim.swarm import ranks as swarm_ranks
from epd_lab.sim.wishes import LOOKING_BACK, MIXED
from epd_lab.sim.workload import GRIDS, UNEVEN, Workload

DAY_S = 86400.0
TOPOLOGIES = ("1e1p1d", "1e1pd", "1epd", "2epd", "2e1p1d", "1e2p1d", "1e1p2d", "2e2p2d", "1ep1d")
SICK = ("oom", "lose_device", "lose_thread")  # what devices do to their engines
KINDS = (
    "kill", "kill", "stall", "slow", "hang", "oom", "lose_device", "partition", "block", "reset",
    "mute", "drain", "skew",
)  # fmt: skip
UNDECLARED = ("raise", "raise_late", "corrupt", "haunt", "haunt", "lose_thread", "jump", "sleep")
ENDS = ("kill", "lose_device", "lose_thread")  # an instance, as does the end of a rank
GATEWAYS = (GATEWAY, operations.SECOND)
CAUSES = {  # kinds of failure that a fault explains, wherever it strikes
    "stall": ("deadline", "lost", "transfer"),
    "hang": ("deadline", "lost", "transfer"),
    "partition": ("deadline", "lost", "transfer"),
    "block": ("deadline", "lost", "transfer"),
    "slow": ("deadline", "lost", "transfer"),
    "haunt": ("deadline", "lost", "transfer", "unavailable"),
    "sleep": ("deadline", "lost", "transfer", "unavailable"),
    "wedge": ("deadline", "lost", "transfer"),
    "lose_thread": ("engine", "unavailable"),
    "raise": ("engine", "transfer"),
    "raise_late": ("engine", "transfer"),
    "corrupt": ("transfer",),
    "oom": ("engine",),
    "poison": ("poison", "lost", "unavailable"),
}
SILENCES = (  # an instance is lost
    *ENDS, "stall", "partition", "block", "mute", "haunt", "sleep", "hang", "wedge",
)  # fmt: skip
LEAVES = ("kill", "stall", "partition", "block", "drain", "ask_drain", "lose_device", "hang")
DIVIDES = ("hang", "oom", "raise", "raise_late")  # a group, of which one rank fails or hangs
POINTS = (
    "MESSAGE:EncodeRequest", "MESSAGE:PrefillRequest", "MESSAGE:Grant", "MESSAGE:Commit",
    "MESSAGE:CommitAck", "MESSAGE:KvOffer", "MESSAGE:Tokens", "OUTGOING:GRANTED>AWAITING_SLOTS",
    "OUTGOING:PARKED>AWAITING_SLOTS", "OUTGOING:WRITING>WRITTEN", "ENCODING:QUEUED>PREPARED",
    "ENCODING:PREPARED>ENCODING", "EMBEDDING:REQUESTED>LOADING", "EMBEDDING:LOADING>RESIDENT",
    "REQUEST:WAITING>RUNNING", "REQUEST:RUNNING>TRANSFERRING",
    "REQUEST:WAITING_FOR_REMOTE_KV>DECODING",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Excuse:
    """What a plan's faults allow to fail, as a `MayFail`; a value, so that plans compare equal."""

    kinds: frozenset[str]
    refusals: bool
    hangs_up: bool = True

    def __call__(self, record: Record) -> str:
        if record.gateway_died:
            return "its gateway was killed" if "gateway" in self.kinds else ""
        if record.refused:
            return "the gateway was down or full" if self.refusals else ""
        if record.error is None:
            return ""
        if record.error.kind != "deadline" and _has_flaw(record):
            return "its image is damaged, and used up the attempts"
        return f"{record.error.kind} by a fault" if record.error.kind in self.kinds else ""


def _has_flaw(record: Record) -> bool:
    return any(p.flaw in ("broken", "unencodable") for _, p in record.ask.images)


FAILED_WRITES = 2  # attempts that one request may lose to writes which fail by chance


def excuse(
    topology: str, faults: tuple[Fault, ...], conditions: Conditions, data: DataConditions
) -> Excuse:
    """Which failures these faults explain."""
    kinds: set[str] = set()
    refusals, num_ends, num_lost = False, 0, 0
    alone = _single_points(topology)
    silences = SILENCES + DIVIDES * (":tp" in topology)
    for fault in faults:
        target, _, rank = fault.target.partition(".")
        num_ends += bool(rank) or fault.kind in ENDS
        num_lost += bool(rank) or fault.kind in silences
        if rank or fault.kind in (*LEAVES, "wedge"):
            if target in alone or fault.other in alone or fault.point:
                kinds.add("unavailable")
                refusals = True  # what waits for the only one of a role comes too late
            if len(faults) > 1:
                kinds.add("unavailable")
        if fault.kind in ("kill", "haunt") and (fault.target in GATEWAYS or fault.point):
            kinds.add("gateway")
            refusals = True
        if fault.kind == "mute" and (GATEWAY in (fault.target, fault.other) or fault.point):
            kinds |= {"lost", "unavailable"}  # who cannot reach the gateway is lost to it
            refusals = True
        kinds.update(CAUSES.get(fault.kind, ()))
        if data.asks and fault.kind in ENDS and not fault.duration_s:
            kinds.add("deadline")  # of who waits for slots that only its next life could fence
    num_ends += FAILED_WRITES * bool(data.failed or data.unknown)
    if num_ends >= Settings().timing.max_attempts:
        kinds.add("lost")
    if num_lost > 1 or conditions.loss or any(fault.target == "all" for fault in faults):
        kinds.add("poison")  # the checker of that looks whether two lives computed it
    if data.failed or data.unknown:
        kinds.add("transfer")
    if conditions.loss:
        kinds |= {"lost", "unavailable"}
    return Excuse(frozenset(kinds), refusals)


def _single_points(topology: str) -> set[str]:
    """Instances that are alone in one of their roles; without them nothing can be served."""
    instances = parse_topology(topology)
    single = {GATEWAY}
    for role in ("encode", "prefill", "decode"):
        holders = [name for name, roles in instances if role in roles]
        if len(holders) == 1:
            single.update(holders)
    return single


def draw_plan(
    seed: int, *, groups: bool = False, varied: bool = False, operated: bool = False
) -> Plan:
    """`groups`: some have groups of ranks; `varied`: time-outs and the sizes of images are drawn,
    too; `operated`: `operations`.  Without, plans are what they were before there was that."""
    random = KeyedRandom(seed, "swarm")
    topology = random.pick(TOPOLOGIES, "topology")
    work = _draw_workload(random)
    if varied:
        work = replace(work, grids=random.pick((GRIDS, UNEVEN), "grids"))
    asks = work.draw(random.stream("work"))
    names = [name for name, _ in parse_topology(topology)]
    count = random.below(3, "faults") + (random.uniform("none") > 0.2)
    faults = tuple(_draw_fault(random.stream("fault", n), names) for n in range(count))
    if random.chance(0.5, "undeclared"):
        faults += (_draw_undeclared(random.stream("undeclared"), names),)
    if random.chance(0.03, "a pill"):
        call, at_s = random.pick(("image", "prompt"), "what pill"), 1 + random.uniform("pill at")
        faults += (Fault("poison", "all", at_s, call=call, duration_s=0.4),)
    conditions, data = _draw_conditions(random)
    settings = _draw_settings(random)
    if varied:
        settings = replace(settings, timing=times.draw(random.stream("times")))
    ranks = random.stream("ranks")
    if groups and ranks.chance(0.5 if settings.has_state else 0.25, "groups"):
        topology = swarm_ranks.with_ranks(ranks, topology)
        settings = replace(settings, rank_lingers_s=ranks.pick((0.0, 1.0), "lingers"))
        if ranks.chance(0.7, "a fault"):
            points = swarm_ranks.STATE_POINTS if settings.has_state else swarm_ranks.POINTS
            faults += (swarm_ranks.draw_rank_fault(ranks, topology, points),)
    if operated:
        operator = random.stream("operator")
        faults += operations.draw(operator, names, _single_points(topology))
        if operator.chance(0.3, "two gateways"):
            settings = replace(settings, num_gateways=2)
            faults += (operations.cut(operator, names),) * operator.chance(0.7, "one is cut")
    may_fail = excuse(topology, faults, conditions, data)
    if random.chance(0.1, "blocks for few"):
        num_blocks = 12 + golden.NUM_STATE_BLOCKS * settings.has_state
        settings = replace(settings, num_blocks=num_blocks)
        may_fail = replace(may_fail, kinds=may_fail.kinds | {"capacity"})
    return Plan(
        seed, topology, asks, faults, conditions, data, settings, may_fail=may_fail,
        engine_faults=any(fault.kind in SICK for fault in faults),
    )  # fmt: skip


def _draw_workload(random: KeyedRandom) -> Workload:
    return Workload(
        num_requests=3 + random.below(14, "requests"),
        spread_s=random.pick((0.02, 0.3, 1.5), "spread"),
        image_share=random.pick((0.3, 0.8, 1.0), "images"),
        num_images=1 + random.below(8, "pictures"),
        num_texts=random.pick((0, 0, 3), "texts"),
        cancel_share=random.pick((0.0, 0.0, 0.3), "cancels"),
        broken_share=random.pick((0.0, 0.0, 0.15), "broken"),
        slow_share=random.pick((0.0, 0.1), "slow pictures"),
        num_words=3 if _num_drafts(random) else 0,
        kinds=random.pick((MIXED, MIXED, LOOKING_BACK), "wishes"),
        stop_share=random.pick((0.0, 0.0, 0.3), "stop strings"),
    )


def _num_drafts(random: KeyedRandom) -> int:
    """Every third run speculates, with answers that can be drafted."""
    return random.pick((0, 0, 4), "guesses")


def _draw_settings(random: KeyedRandom) -> Settings:
    """Pools that are sometimes too small for all requests at once, not for a single one.  Every
    fifth model has a state, and in every fifth run KV lands in front of its pool, but for that of
    instances near by."""
    settings = Settings()
    num_slots = random.pick((12, 24), "slots")
    share = random.pick((0.5, 1.0), "share")
    nbytes = num_slots * settings.prefill.slot_nbytes
    is_eager = random.chance(0.3, "hedges")
    prefill = msgspec.structs.replace(
        settings.prefill,
        pool_nbytes=nbytes,
        max_slots_share_per_peer=share,
        hedge_after_s=0.01 if is_eager else settings.prefill.hedge_after_s,
        min_measured_loads=1 if is_eager else settings.prefill.min_measured_loads,
    )
    has_state = random.chance(0.3, "a state")
    num_blocks = random.pick((24, 40, 64), "blocks")
    num_state_blocks = golden.NUM_STATE_BLOCKS * has_state
    lands = random.chance(0.2, "lands in front of the pool")
    return replace(
        settings,
        prefill=prefill,
        encode=_draw_encode(random, settings.encode),
        engine=_draw_engine(random, settings.engine),
        disk=_draw_disk(random),
        num_blocks=num_blocks + num_state_blocks,
        num_landing_blocks=(20 + num_state_blocks) * lands,
        near=random.pick(((), ("",), ("p0", "d")), "near by") if lands else (),
        has_state=has_state,
    )


def _draw_encode(random: KeyedRandom, encode: EncodeConfig) -> EncodeConfig:
    """Every second run has more tiers than one; every third sends through a ring."""
    slot_nbytes = 4 * golden.ROW_NBYTES
    num_slots = random.pick((0, 0, 5), "send slots")
    encode = msgspec.structs.replace(
        encode, send_buffer_nbytes=num_slots * slot_nbytes, send_slot_nbytes=slot_nbytes
    )
    if random.chance(0.5, "one tier"):
        return encode
    return msgspec.structs.replace(
        encode,
        cache_device_nbytes=random.pick((1, 640), "device tier"),
        cache_host_nbytes=random.pick((0, 640), "host tier"),
        cache_dir=random.pick(("", "simulated"), "disk tier"),
        cache_disk_nbytes=random.pick((2048, 16384), "disk"),
        cache_load_timeout_s=0.3,
    )


def _draw_engine(random: KeyedRandom, engine: EngineConfig) -> EngineConfig:
    """Every second instance runs a step ahead, unless it speculates; every third bounds the length
    of a piece of work."""
    count = _num_drafts(random)
    speculative = SpeculativeConfig("ngram", count, 1, 3) if count else SpeculativeConfig()
    if count and random.chance(0.3, "drafts by a layer"):
        speculative = SpeculativeConfig("mtp", count)
    ahead = random.chance(0.5, "a step ahead")
    quantum_ms = random.pick((0.0, 0.0, 4.0), "quantum")
    return msgspec.structs.replace(
        engine, async_scheduling=ahead, speculative=speculative, max_quantum_ms=quantum_ms
    )


def _draw_disk(random: KeyedRandom) -> DiskConditions:
    if random.chance(0.4, "a sound disk"):
        return DiskConditions()
    lies = 0.1 if random.chance(0.5, "a disk that lies") else 0.0
    return DiskConditions(
        slow=0.1, torn=0.1, rotten=0.1, mixed=0.1, lost=0.1, full=0.1, undurable=lies, stale=lies,
        flipped=lies,
    )  # fmt: skip


def _draw_conditions(random: KeyedRandom) -> tuple[Conditions, DataConditions]:
    conditions = Conditions(
        jitter_s=random.pick((0.0, 0.0006, 0.02), "jitter"),
        loss=random.pick((0.0, 0.0, 0.0, 0.02), "loss"),
        duplication=random.pick((0.0, 0.0, 0.05), "duplication"),
    )
    data = DataConditions(
        kind=random.pick(("shm", "shm", "rdma"), "hardware"),
        nbytes_per_s=random.pick((2e6, 2e5, 2e4), "bandwidth"),
        failed=random.pick((0.0, 0.0, 0.05), "failed writes"),
        unknown=random.pick((0.0, 0.0, 0.0, 0.05), "writes in doubt"),
        asks=random.chance(0.4, "between hosts"),
        own_check=random.chance(0.3, "it sums what it moves"),
    )
    return conditions, data


def _draw_fault(random: KeyedRandom, names: list[str]) -> Fault:
    kind = random.pick(KINDS, "kind")
    targets = [*names, GATEWAY] if kind in ("stall", "reset", "mute") else names
    target = random.pick(targets, "target")
    rest = [name for name in (*names, GATEWAY) if name != target]
    point, nth, at_s = "", 1, 1.0 + 1.2 * random.uniform("at")
    if random.chance(0.6, "at a point"):
        point, nth, at_s = random.pick(POINTS, "point"), 1 + random.below(8, "nth"), 0.0
        target = random.pick(("here", "peer", target), "role")
    duration_s = random.pick((0.05, 0.4, 1.2, 3.0, 8.0), "duration")
    if kind == "stall" and random.chance(0.6, "long enough to be declared lost"):
        duration_s = 4.0
    if kind == "kill" and random.chance(0.3, "stays down"):
        duration_s = 0.0
    factors = {"oom": 1.0 + random.below(3, "works"), "skew": random.between(-0.5, 0.5, "skew")}
    factor = factors.get(kind, 10.0)
    other = (
        random.pick(rest, "other")
        if kind in ("partition", "block", "reset", "mute", "drain", "skew")
        else ""
    )
    return Fault(kind, target, at_s, point, nth, duration_s=duration_s, other=other, factor=factor)


def _draw_undeclared(random: KeyedRandom, names: list[str]) -> Fault:
    """One more, of the kinds that no port declares."""
    kind = random.pick(UNDECLARED, "kind")
    fault = _draw_fault(random, names)
    target, point = fault.target, fault.point
    call, factor, duration_s = "", 1.0 + random.below(3, "calls"), 0.0
    if kind in ("raise", "raise_late"):
        call = random.pick(CALLS, "call")
    elif kind == "corrupt":
        call = "told"
    elif kind == "lose_thread":
        call = random.pick(("", "pool"), "thread")
    elif kind == "haunt":
        target = random.pick((*names, GATEWAY), "whose words")
        duration_s = random.pick((0.01, 0.2, 0.8, 2.5), "until it dies")
        factor = random.pick((0.001, 0.05, 0.6, 3.0), "until it speaks")
    elif kind == "jump":
        target = random.pick(("all", *names, GATEWAY), "whose clock")
        factor = random.pick((-DAY_S, -10.0, 10.0, DAY_S), "by how much")
    else:
        target, point = "all", ""
        call = random.pick(("", "stops"), "monotonic")
        duration_s = random.pick((0.3, 2.5, 8.0), "asleep")
    at_s = fault.at_s or 1.0 + 1.2 * random.uniform("when")
    return replace(
        fault, kind=kind, target=target, point=point, at_s=0.0 if point else at_s,
        duration_s=duration_s, other="", call=call, factor=factor,
    )  # fmt: skip
