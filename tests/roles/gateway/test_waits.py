"""How long is waited for what: for KV, for a first token, for an instance that comes back."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import msgspec

from epd.frontend import TimeLimits
from epd.messages import EncodeRequest, KvOffer, Message, PrefillRequest
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.engine.golden import Image
from tests.roles.simulated import DEFAULTS, Simulated, simulated

SLOW = replace(DEFAULTS, costs=Costs(step_base_s=0.1))


def test_what_leads_to_a_first_token_is_due_with_it() -> None:
    """A client's patience ends long before its request's time."""
    limits = TimeLimits(first_token_s=2.0, token_s=5.0, total_s=20.0)
    said: list[Message] = []
    with simulated("1e1p1d") as cluster:
        network, rooms = cluster.world.network, cluster.instance("p0").outgoing
        network.on_message.append(lambda source, target, message: said.append(message))
        asked_s = cluster.gateway.actor.cluster_s()
        with mock.patch.object(rooms, "open", wraps=rooms.open) as opened:
            record = cluster.ask(Image("one"), max_tokens=3, limits=limits)
            cluster.pass_time(0.5)
    assert record.finish_reason
    due_s = [m.first_token_deadline_s for m in said if isinstance(m, EncodeRequest)]
    for kind in (PrefillRequest, KvOffer):
        (message,) = (m for m in said if isinstance(m, kind))
        due_s.append(message.first_token_deadline_s)
        assert 19.0 < message.deadline_s - asked_s < 21.0, kind
    due_s.append(opened.call_args.args[-2])
    assert len(due_s) == 4
    assert all(1.0 < due - asked_s < 4.0 for due in due_s), due_s


def test_what_was_computed_before_the_grant_leaves_when_it_comes() -> None:
    """Not with the next chunk, which may take long."""
    settings = replace(SLOW, engine=msgspec.structs.replace(SLOW.engine, max_chunk_tokens=8))
    with simulated("1e1p1d", settings) as cluster:
        requests, rooms = cluster.instance("p0").requests, cluster.instance("p0").outgoing
        assert requests is not None
        cluster.world.network.block("d0", "p0")
        record = cluster.ask(Image("one"), Image("two"), max_tokens=3)
        cluster.pass_time(0.01)
        machine = requests.get(f"{record.request_id}/1")
        assert machine is not None
        while machine.num_computed < 8:
            cluster.pass_time(0.001)
        transfer = rooms.find(machine.kv_room)
        assert transfer is not None and transfer.grant is None and not transfer.ready_nbytes
        num_computed = machine.num_computed
        cluster.world.network.heal("d0", "p0")
        cluster.pass_time(0.03)
        assert machine.num_computed == num_computed
        assert transfer.ready_nbytes
        cluster.pass_time(5.0)
    assert record.finish_reason


def away(cluster: Simulated, name: str, for_s: float) -> None:
    cluster.world.kill(name)
    cluster.cluster.restart_later(name, for_s)
    cluster.pass_time(for_s + 1.0)


def test_each_wait_for_an_instance_has_its_whole_time() -> None:
    timing = msgspec.structs.replace(SLOW.timing, topology_timeout_s=5.0)
    with simulated("1epd", replace(SLOW, timing=timing)) as cluster:
        record = cluster.ask(max_tokens=40, stops_at_eos=False)
        cluster.pass_time(0.5)
        for _ in range(2):
            away(cluster, "epd0", 6.0)
            assert record.error is None
        cluster.pass_time(8.0)
    assert len(record.tokens) == 40
