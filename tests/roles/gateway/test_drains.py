"""An operator takes an instance out: who may be, what moves at the bound, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.frontend import Refused
from epd.fsm import generation
from epd.fsm import instance as registered
from epd.roles.gateway import drains
from epd_lab.sim.client import Record
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.engine.golden import Image
from tests.roles.simulated import DEFAULTS, Simulated, simulated

SLOW = replace(DEFAULTS, costs=Costs(step_base_s=0.05), num_blocks=256)  # an answer takes seconds


def ask(cluster: Simulated, name: str, within_s: float = 0.2, **how: bool) -> None:
    """Its process leaves when nothing is open, as `serve_instance` does."""
    asked = {"forced": False, "restarts": True, **how}
    node = cluster.cluster.node(name)
    if node is not None and node.instance is not None:
        instance, context = node.instance, node.process.context

        def leave(restarts: bool, roles: tuple[str, ...]) -> None:
            cluster.world.loop.create_task(instance.drain(), name="drain", context=context)

        instance.member.on_drain_asked = leave
    drain = cluster.gateway.role.drain
    cluster.item(GATEWAY, lambda: drain(name, within_s, **asked))


def refusal(cluster: Simulated, name: str) -> str:
    with pytest.raises(Refused) as refused:
        ask(cluster, name)
    return f"{refused.value.status} {refused.value.message}"


def streams(cluster: Simulated, count: int) -> list[Record]:
    made = [
        cluster.ask(text=(11, 12, 13 + n), max_tokens=60, seed=n, stops_at_eos=False)
        for n in range(count)
    ]
    cluster.pass_time(0.5)
    return made


def test_who_is_not_there_or_drains_or_is_the_only_one_is_refused_in_words() -> None:
    with simulated("1e1p2d", SLOW) as cluster:
        names = "d0, d1, e0, p0"
        assert refusal(cluster, "d7") == f"404 no instance d7 is a member; there are {names}"
        alone = refusal(cluster, "p0")
        assert alone.startswith("409 without p0 no healthy instance has the role prefill")
        cluster.ask(max_tokens=60, stops_at_eos=False)
        cluster.pass_time(0.1)
        ask(cluster, "d0", 30.0)
        cluster.pass_time(0.02)
        again = refusal(cluster, "d0")
        assert again == "409 d0 drains already; what is open moves in 30 s"
        assert "the role decode" in refusal(cluster, "d1")
        ask(cluster, "p0", forced=True)
        cluster.pass_time(1.0)
        assert cluster.registered("p0").state is registered.S.LEFT


def test_who_is_to_have_other_roles_returns_with_them() -> None:
    with simulated("1e1p2d", SLOW) as cluster:
        for name, roles, reason in (
            ("d0", ("decode",), "d0 has these roles already"),
            ("p0", ("prefill", "decode"), "without p0 no healthy instance has the role prefill"),
        ):
            with pytest.raises(Refused, match=reason):
                cluster.gateway.role.drain(name, 0.2, forced=False, restarts=True, roles=roles)
        records = streams(cluster, 4)
        give = cluster.gateway.role.drain
        how = {"forced": False, "restarts": True, "roles": ("encode", "prefill")}
        cluster.item(GATEWAY, lambda: give("d0", 0.2, **how))
        cluster.pass_time(0.1)
        assert cluster.registered("d0").state is registered.S.SWITCHING
        cluster.pass_time(20.0)
        now = cluster.registered("d0")
        assert (now.state, now.info.roles) == (registered.S.HEALTHY, ("encode", "prefill"))
        assert [tuple(record.tokens) for record in records] == [
            tuple(r.ask.answer()) for r in records
        ]


def test_a_group_of_ranks_keeps_its_roles() -> None:
    with simulated("1e2pd:tp2", SLOW) as cluster:
        cluster.pass_time(2.0)
        with pytest.raises(Refused, match="pd0 is a group of ranks; start it anew with other"):
            cluster.gateway.role.drain("pd0", 1.0, forced=True, restarts=True, roles=("decode",))


def test_what_is_open_at_the_bound_moves_while_the_instance_streams_on() -> None:
    with simulated("1e2pd", SLOW) as cluster:
        records = streams(cluster, 8)
        at = {one.placement.decode.instance_id for one in cluster.gateway.role.open_ones()}
        assert at == {"pd0", "pd1"}
        ask(cluster, "pd0")
        cluster.pass_time(0.1)
        ones = [one for one in cluster.gateway.role.open_ones() if one.has_attempt]
        assert {one.attempt for one in ones} == {1}, "it has its time"
        cluster.pass_time(1.0)
        gone = cluster.registered("pd0")
        assert (gone.state, gone.reason) == (registered.S.LEFT, "it was asked to end")
        ones = cluster.gateway.role.open_ones()
        assert {one.placement.decode.instance_id for one in ones} == {"pd1"}
        moved = cluster.gateway.actor.counters["attempts_moved"]
        assert moved == sum(one.attempt == 2 for one in ones) > 0
        assert not any(one.failures for one in ones), "nobody failed"
        cluster.pass_time(20.0)
        assert [tuple(record.tokens) for record in records] == [
            tuple(r.ask.answer()) for r in records
        ]


def test_as_many_move_at_once_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "MAX_MOVING", 1)
    with simulated("1e2pd", SLOW) as cluster:
        streams(cluster, 8)
        most = 0
        ask(cluster, "pd0")
        for _ in range(100):
            cluster.pass_time(0.02)
            most = max(most, sum(one.resumes for one in cluster.gateway.role.open_ones()))
        assert most == 1
        assert cluster.registered("pd0").state is registered.S.LEFT


def test_what_has_no_other_place_stays_until_the_instance_leaves() -> None:
    with simulated("1e1p1d", SLOW) as cluster:
        records = streams(cluster, 2)
        ask(cluster, "d0", forced=True)
        cluster.pass_time(0.5)
        assert {one.state for one in cluster.gateway.role.open_ones()} == {generation.S.STREAMING}
        assert cluster.registered("d0").is_overdue
        cluster.pass_time(SLOW.timing.move_timeout_s)
        ones = cluster.gateway.role.open_ones()
        assert {one.state for one in ones} <= {generation.S.AWAITING_TOPOLOGY}
        assert len(ones) == len(records)


def test_images_go_with_their_prompt() -> None:
    with simulated("2epd", SLOW) as cluster:
        record = cluster.ask(Image("one"), max_tokens=60, stops_at_eos=False)
        cluster.pass_time(0.5)
        (one,) = cluster.gateway.role.open_ones()
        ask(cluster, one.placement.decode.instance_id, 0.0)
        cluster.pass_time(20.0)
        assert tuple(record.tokens) == tuple(record.ask.answer())
        assert cluster.gateway.actor.counters["attempts_moved"] == 1
