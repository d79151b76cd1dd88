"""What /metrics says of each process: its bus, its stages and hops."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd.api.watching.metrics import exposition
from epd.fsm import encoding, generation, outgoing, request
from epd.fsm.kernel import Event, Machine, State
from epd.messages import TransportLack, TransportOffer
from epd.roles.watching.stage_times import SECONDS
from epd_lab.sim.cluster import GATEWAY, Cluster
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.golden import ROW_NBYTES, Image
from epd_lab.sim.run import Plan, run
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World
from tests.roles.simulated import simulated


def test_what_a_bus_drops_is_counted_per_instance() -> None:
    dropped = {"e0": "malformed", "pd0": "queue_full", GATEWAY: "stale_target"}
    with simulated("1e1pd") as at:
        for name, kind in dropped.items():
            at.node(name).ports.bus.dropped[kind] += 3
        at.pass_time(1.0)
        samples = at.gateway.role.metrics()
    found = {s.labels: s.value for s in samples if s.name == "epd_bus_dropped_total"}
    assert found == {(("instance", n), ("kind", kind)): 3 for n, kind in dropped.items()}


WAITS = ("WAITING_FOR_EMBEDDINGS", "WAITING_MID_PROMPT")


class Watch:
    """What each stage and hop took, as seen from outside: by every transition of every machine."""

    def __init__(self) -> None:
        self.cluster: Any = None
        self.spent_s: Counter[tuple[str, str, str]] = Counter()  # of each machine, by state
        self._since: dict[tuple[str, str, str], tuple[str, float]] = {}

    def prepare(self, world: World, cluster: Cluster) -> None:
        self.cluster = cluster
        self._world = world
        tables = (request.Request, encoding.Encoding, generation.Generation, outgoing.Outgoing)
        for events in {event for machine in tables for event in machine.table.events}:
            world.watch(self._see, events)

    def _see(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        key = (process.name, machine.table.name, machine.key)
        now_s = self._world.loop.now_s
        state, since_s = self._since.get(key, (source.name, now_s))
        if source is not target or key not in self._since:
            if key in self._since:
                self.spent_s[key[0], key[1], state] += now_s - since_s
            self._since[key] = (target.name, now_s)


def samples_of(cluster: Cluster, name: str) -> dict[tuple[str, ...], float]:
    """Values by the label values that tell one histogram from another, and the sample's kind."""
    node = cluster.node(GATEWAY)
    assert node is not None and node.gateway is not None
    return {
        (*(value for _, value in m.labels), m.name.removeprefix(f"{name}_")): m.value
        for m in node.gateway.role.metrics()
        if m.name.startswith(name)
    }


def test_stages_and_hops_are_right_in_number_and_sum() -> None:
    """Eight requests on 1e1p1d, half with an image of their own; sums agree with a stopwatch."""
    asks = tuple(
        Ask(n, 1.0 + 0.01 * n, tuple(range(20, 60)), ((3, Image(f"p{n}")),) * (n % 2))
        for n in range(8)
    )
    watch = Watch()
    result = run(Plan(2, "1e1p1d", asks), keep=True, prepare=watch.prepare)
    assert result.passed and result.world is not None
    num_requests, num_images = len(result.records), 4 + 1  # and one of the probes
    stages = samples_of(watch.cluster, "epd_stage_seconds")
    for instance, role, stage, count, machine, *states in (
        ("e0", "encode", "encode", num_images, "ENCODING", "ENCODING"),
        ("e0", "encode", "decode-image", num_images, "ENCODING", "QUEUED"),
        ("p0", "prefill", "queue", num_requests, "REQUEST", "WAITING"),
        ("p0", "prefill", "wait", num_images, "REQUEST", *WAITS),
        ("p0", "prefill", "prefill", num_requests, "REQUEST", "RUNNING"),
        ("p0", "prefill", "kv", num_requests, "REQUEST", "TRANSFERRING"),
        ("d0", "decode", "kv", num_requests, "REQUEST", "WAITING_FOR_REMOTE_KV"),
        ("d0", "decode", "decode", num_requests, "REQUEST", "DECODING"),
        ("gateway", "gateway", "prepare", num_requests, "GENERATION", "PREPARING"),
    ):
        assert stages[instance, role, stage, "count"] == count, (instance, stage)
        assert stages[instance, role, stage, "+Inf", "bucket"] == count
        seen_s = sum(watch.spent_s[f"{instance}:1", machine, state] for state in states)
        assert stages[instance, role, stage, "sum"] == pytest.approx(seen_s), (instance, stage)
    hops = samples_of(watch.cluster, "epd_hop_nbytes")
    rows = ("e0", "rows", "sim")
    assert hops[*rows, "count"] == num_images
    assert hops[*rows, "sum"] == num_images * Image("p").num_rows * ROW_NBYTES
    assert hops["p0", "kv", "sim", "count"] == num_requests
    ends = samples_of(watch.cluster, "epd_transfers_total")
    for instance, end, hop, count in (
        ("e0", "outgoing", "rows", num_images),
        ("p0", "incoming", "rows", num_images),
        ("p0", "outgoing", "kv", num_requests),
        ("d0", "incoming", "kv", num_requests),
    ):
        assert ends[instance, end, hop, "delivered", "epd_transfers_total"] == count
    links = samples_of(watch.cluster, "epd_link_nbytes_total")
    assert links["e0", "p0", "sim", "epd_link_nbytes_total"] == hops[*rows, "sum"]
    gaps = samples_of(watch.cluster, "epd_inter_token_seconds")
    num_tokens = sum(len(record.tokens) for record in result.records)
    assert gaps["gateway", "count"] == num_tokens - num_requests
    assert (
        samples_of(watch.cluster, "epd_time_per_output_token_seconds")["gateway", "count"]
        == num_requests
    )
    took = samples_of(watch.cluster, "epd_hop_seconds")
    moving_s = watch.spent_s["e0:1", "OUTGOING", "WRITING"]
    assert took[*rows, "sum"] == pytest.approx(moving_s) and moving_s > 0
    result.world.close()


def test_how_full_the_cluster_is() -> None:
    with simulated("1e1p1d") as at:
        for name, running, waiting, share in (("p0", 3, 5, 0.25), ("d0", 2, 0, 0.5)):
            instance = at.registered(name)
            blocks = int(instance.info.num_kv_blocks * share)
            live = (("kv_blocks", blocks), ("running", running), ("waiting", waiting))
            instance.load = msgspec.structs.replace(instance.load, live=live)
        found = {(s.name, s.labels): s.value for s in at.gateway.role.metrics()}
    p0 = (("instance", "p0"),)
    assert found["epd_instance_requests_waiting", p0] == 5
    assert found["epd_instance_requests_running", p0] == 3
    assert found["epd_instance_kv_cache_usage", p0] == 0.25
    assert found["epd_requests_waiting", ()] == 5 and found["epd_requests_running", ()] == 5
    assert found["epd_kv_cache_usage", ()] == 0.375
    assert ("epd_instance_kv_cache_usage", (("instance", "e0"),)) not in found
    infos = [at.registered(name).info for name in ("p0", "d0")]
    sizes = {str(info.kv_layout.block_size) for info in infos if info.kv_layout is not None}
    count = str(sum(info.num_kv_blocks for info in infos))
    size = (("block_size", *sizes), ("num_gpu_blocks", count))
    assert found["epd_cache_config_info", size] == 1


def test_a_pair_that_fell_back_is_named() -> None:
    with simulated("1e1p1d") as at:
        p0, d0 = at.registered("p0"), at.registered("d0")
        better = TransportOffer(name="fast", domain="")
        p0.info = msgspec.structs.replace(p0.info, transports=(better, *p0.info.transports))
        lack = TransportLack(name="fast", reason="no library")
        d0.info = msgspec.structs.replace(d0.info, lacks=(lack,))
        told = {one["instance"]: one for one in at.gateway.role.ready().instances}
        samples = at.gateway.role.metrics()
        at.instance("e0").member.leave()
        at.pass_time(1.0)
        later = {one["instance"]: one["transports"] for one in at.gateway.role.ready().instances}
    reason = "not fast: d0 lacks it: no library"
    assert {name: one["fallbacks"] for name, one in told.items()} == {
        "e0": {}, "p0": {"d0": reason}, "d0": {"p0": reason},
    }  # fmt: skip
    found = {s.labels: s.value for s in samples if s.name == "epd_pair_fell_back"}
    assert found == {
        (("instance", one), ("peer", other), ("transport", "sim")): fell
        for one, other, fell in (("e0", "p0", 0), ("p0", "e0", 0), ("p0", "d0", 1), ("d0", "p0", 1))
    }
    assert later == {"e0": {}, "p0": {"d0": "sim"}, "d0": {"p0": "sim"}}


def test_buckets_grow_and_all_names_are_documented() -> None:
    asks = (Ask(0, 1.0, tuple(range(20, 60))),)
    watch = Watch()
    result = run(Plan(2, "1epd", asks), keep=True, prepare=watch.prepare)
    node = watch.cluster.node(GATEWAY)
    text = exposition(node.gateway.role.metrics()).decode()
    document = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    kinds = dict(re.findall(r"# TYPE (\w+) (\w+)", text))
    assert kinds["epd_stage_seconds"] == kinds["epd_hop_seconds"] == "histogram"
    assert [name for name in kinds if name not in document] == []
    found = samples_of(watch.cluster, "epd_stage_seconds")
    own = [found["epd0", "decode", "decode", str(bound), "bucket"] for bound in (*SECONDS, "+Inf")]
    assert own == sorted(own) and own[-1] == len(result.records)
    assert result.world is not None
    result.world.close()
