"""What a gateway reports in /metrics and /ready: on itself, and by heartbeats on every instance.

docs/observability.md lists the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from epd.frontend import InstanceFacts, Metric, OutsideFacts, Readiness, histogram
from epd.fsm.instance import Instance
from epd.observed import StageLoad
from epd.records import Counted, Histogram
from epd.roles.base import Actor
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.registry import Outsider, Registry
from epd.roles.watching.stage_times import COUNTS, KINDS
from epd.scheduling import pairing
from epd.scheduling.predicted_rule import COSTS
from epd.topology import ROLES, natural

TOTALS = {
    "preemptions": "requests that gave their KV blocks up for an older one",
    "prefix_cache_queried_tokens": "prompt tokens that were looked for in the prefix cache",
    "prefix_cache_hit_tokens": "of them, tokens whose KV was found",
    "state_snapshots": "copies of states that were kept behind beginnings of prompts",
    "spec_decode_num_drafts": "parts of steps that verified drafts of a request",
    "spec_decode_num_draft_tokens": "drafts that were verified",
    "spec_decode_num_accepted_tokens": "drafts that were right; each part says one more",
}
DROPPED = "messages that the bus did not let in or did not send"
SILENT = "peers that do not answer this instance; its links to them are opened anew"
QUEUES = {"waiting": "requests that wait for the batch", "running": "requests in the batch"}
KV_USAGE = "share of the KV blocks that requests hold, 0 to 1"
CACHE_CONFIG = "tokens of a KV block, on whatever device, and how many blocks all instances have"
FELL_BACK = "1: the pair does not use the best transport; /ready has the reason"
LOAD = "predicted work that waits for a stage; of decode, the time of a step"
COST = "as the instance measured it last; placement counts with it; 0: not yet"
WAIT = "for how long no work of this kind has ended, while some are under way"
WAIT_BOUND = "beyond it the instance is STUCK and gets no new work"
IN_USE = "memory and work in use by kind; zero when idle"


def own_metrics(
    outcomes: Mapping[str, int], num_tokens: int, num_open: int, actor: Actor
) -> Iterator[Metric]:
    """Samples of the gateway's own process."""
    for outcome, count in sorted(outcomes.items()):
        labels = (("outcome", outcome),)
        yield Metric("epd_requests_total", count, labels, "counter", "ended requests")
    yield Metric("epd_output_tokens_total", num_tokens, (), "counter", "tokens")
    yield Metric("epd_open_requests", num_open, (), "gauge", "open requests")
    for kind, count in sorted(actor.counters.items()):
        yield Metric("epd_gateway_events_total", count, (("kind", kind),), "counter", "oddities")
    own, dropped = actor.address.instance_id, sorted(actor.bus.dropped.items())
    yield from _by_kind("epd_bus_dropped_total", own, dropped, "counter", DROPPED)
    yield from _histograms(own, actor.times.told())


def _by_kind(
    name: str, instance: str, counts: Iterable[tuple[str, int]], is_a: str, text: str
) -> Iterator[Metric]:
    for kind, count in counts:
        yield Metric(name, count, (("instance", instance), ("kind", kind)), is_a, text)


def _histograms(instance: str, told: Iterable[Histogram]) -> Iterator[Metric]:
    for one in told:
        text, bounds = KINDS[one.name]
        labels = (("instance", instance), *one.labels)
        yield from histogram(one.name, text, bounds, one.counts, one.total, labels)


def _counts(instance: str, told: Iterable[Counted]) -> Iterator[Metric]:
    for one in told:
        labels = (("instance", instance), *one.labels)
        yield Metric(one.name, one.value, labels, "counter", COUNTS[one.name])


def queue_metrics(instances: Iterable[Instance], loads: Iterable[StageLoad]) -> Iterator[Metric]:
    """How full the cluster is, as those ask who choose between clusters (see the names of the
    Gateway API's inference extension), and each instance.

    A request counts at each instance where it is: at prefill, then at decode.
    """
    total = Counter[str]()
    used, capacity, block_size = 0, 0, 0
    for one in instances:
        if one.present and one.info.kv_layout is not None:
            block_size = one.info.kv_layout.block_size  # equal at all
            live, labels = dict(one.load.live), (("instance", one.info.address.instance_id),)
            for kind, text in QUEUES.items():
                total[kind] += live.get(kind, 0)
                yield Metric(f"epd_instance_requests_{kind}", live.get(kind, 0), labels, help=text)
            blocks, size = live.get("kv_blocks", 0), one.info.num_kv_blocks
            used, capacity = used + blocks, capacity + size
            yield Metric("epd_instance_kv_cache_usage", _share(blocks, size), labels, help=KV_USAGE)
    for kind, text in QUEUES.items():
        yield Metric(f"epd_requests_{kind}", total[kind], (), help=f"{text}; of all instances")
    yield Metric("epd_kv_cache_usage", _share(used, capacity), (), help=f"{KV_USAGE}; of all")
    if capacity:
        geometry = (("block_size", str(block_size)), ("num_gpu_blocks", str(capacity)))
        yield Metric("epd_cache_config_info", 1, geometry, help=CACHE_CONFIG)
    for load in loads:
        of = (("instance", load.instance), ("stage", load.stage))
        yield Metric("epd_instance_load_seconds", load.load_s, of, help=LOAD)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def instance_metrics(instance: Instance) -> Iterator[Metric]:
    """Samples of one instance, of its last heartbeat."""
    name = instance.info.address.instance_id
    up = (("instance", name), ("state", instance.state.name))
    info = (*up, ("attention", instance.info.attention), ("films", instance.info.films))
    yield Metric("epd_instance_info", 1, info, "gauge", "registry")
    if instance.present:
        load = instance.load
        yield from _by_kind("epd_in_use", name, load.live, "gauge", IN_USE)
        yield from _by_kind("epd_instance_events_total", name, load.events, "counter", "oddities")
        yield from _by_kind("epd_bus_dropped_total", name, load.dropped, "counter", DROPPED)
        num_silent = len(instance.load.silent_peers)
        yield Metric("epd_silent_peers", num_silent, up[:1], "gauge", SILENT)
        for wait in load.waits:
            of = (up[0], ("what", wait.what))
            yield Metric("epd_wait_seconds", wait.for_s, of, help=WAIT)
            yield Metric("epd_wait_bound_seconds", wait.bound_s, of, help=WAIT_BOUND)
        for cost in COSTS:
            labels = (up[0], ("cost", cost.removesuffix("_s")))
            yield Metric("epd_cost_seconds", getattr(load.costs, cost), labels, "gauge", COST)
        totals = dict(instance.load.totals)
        for kind, text in TOTALS.items() if instance.info.kv_layout is not None else ():
            yield Metric(f"epd_{kind}_total", totals.get(kind, 0), up[:1], "counter", text)
        yield from _cache_metrics(instance)
        yield from _histograms(name, instance.load.histograms)
        yield from _counts(name, instance.load.counts)


def _cache_metrics(instance: Instance) -> Iterator[Metric]:
    """The tiers of an encoder's cache of rows; counts begin with the process."""
    load, own = instance.load, ("instance", instance.info.address.instance_id)
    if not load.cache:
        return
    yield Metric("epd_encodes_total", load.num_encoded, (own,), "counter", "images encoded")
    for tier in load.cache:
        labels = (own, ("tier", tier.tier))
        name = "epd_encoder_cache"
        yield Metric(f"{name}_nbytes", tier.nbytes, labels, "gauge", "rows kept")
        capacity = tier.capacity_nbytes
        yield Metric(f"{name}_capacity_nbytes", capacity, labels, "gauge", "bound of rows kept")
        yield Metric(f"{name}_hits_total", tier.hits, labels, "counter", "rows found")
        yield Metric(f"{name}_misses_total", tier.misses, labels, "counter", "rows not found")
        evictions = "rows that left for lack of room"
        yield Metric(f"{name}_evictions_total", tier.evictions, labels, "counter", evictions)
        failures = "rows that could not be read or written"
        yield Metric(f"{name}_failures_total", tier.failures, labels, "counter", failures)


def _pairs_of(one: Instance, registry: Registry) -> Iterator[tuple[str, str, str]]:
    """Members that it exchanges rows or KV with, the transport, and why it is not a better one."""
    for other in registry.instances if one.present else ():
        if other is not one and other.present and pairing.exchange(one.info, other.info):
            pair = one.info, other.info
            name = other.info.address.instance_id
            yield name, pairing.choose(*pair), pairing.fallback(*pair)


def pair_metrics(registry: Registry) -> Iterator[Metric]:
    for one in registry.instances:
        own = ("instance", one.info.address.instance_id)
        for peer, transport, reason in _pairs_of(one, registry):
            labels = (own, ("peer", peer), ("transport", transport))
            yield Metric("epd_pair_fell_back", float(bool(reason)), labels, help=FELL_BACK)


def readiness(reason: str, registry: Registry, dispatcher: Dispatcher, now_s: float) -> Readiness:
    """Of each instance, also of who is gone; and who has no place."""
    takers = {one.info.address.instance_id: one.info.roles for one in registry.takers()}
    idle = [one for one in registry.instances if one.present and not one.takes_work and one.reason]
    if reason and idle:
        told = (f"{one.info.address.instance_id} {one.reason}" for one in idle)
        reason = f"{reason}; {', '.join(told)}"
    known = sorted(registry.instances, key=lambda one: natural(one.info.address.instance_id))
    instances = [_facts(one, registry, dispatcher, now_s) for one in known]
    outside = [_outside(one, now_s) for one in registry.outside]
    stages = {role: [n for n, roles in takers.items() if role in roles] for role in ROLES}
    return Readiness(not reason, reason, instances, outside, stages)


def _facts(
    one: Instance, registry: Registry, dispatcher: Dispatcher, now_s: float
) -> InstanceFacts:
    name = one.info.address.instance_id
    pairs = [*_pairs_of(one, registry)]
    return {
        "instance": name,
        "epoch": one.info.address.epoch,
        "pid": one.info.pid,
        "num_ranks": 1 + len(one.info.other_ranks),
        "roles": list(one.info.roles),
        "state": one.state.name,
        "assigned": dispatcher.books.assigned_to(name),
        "transports": {peer: transport for peer, transport, _ in pairs},
        "fallbacks": {peer: reason for peer, _, reason in pairs if reason},
        "cached_images": dispatcher.num_resident(name),
        "silent_peers": list(one.load.silent_peers),
        "silent_s": now_s - one.seen_s,
        "drain_left_s": one.drain_left_s if one.is_draining else None,
        "waits": [{"what": w.what, "for_s": w.for_s, "bound_s": w.bound_s} for w in one.load.waits],
        "reason": one.reason or one.info.kept_roles,
    }


def _outside(one: Outsider, now_s: float) -> OutsideFacts:
    address = one.info.address
    return OutsideFacts(
        instance=address.instance_id,
        epoch=address.epoch,
        pid=one.info.pid,
        endpoint=address.endpoint,
        roles=list(one.info.roles),
        state=one.state,
        since_s=now_s - one.since_s,
        reason=one.reason,
    )
