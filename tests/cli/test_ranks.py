"""Groups over hosts, as commands plan them: the leader's part, and ranks of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd.cli.configure.settings import build_settings
from epd.cli.start.plan import LogOptions, Placing, StartPlan, plan_rank, plan_topology
from epd.config import ConfigError, Settings
from epd.transport.base import TransportError

LOG = LogOptions()


def over_hosts(text: str, tmp_path: Path, elsewhere: int, **settings: object) -> StartPlan:
    listen = "tcp://127.0.0.1:7000"
    placing = Placing("", listen, str(tmp_path), ranks_elsewhere=elsewhere, ranks_port=7009)
    return plan_topology(text, build_settings(flags=settings), placing, LOG)


def test_a_leader_has_fewer_ranks_here_and_transports_between_hosts(tmp_path: Path) -> None:
    on_gpus = {"engine.device": "cuda:0,cuda:1"}
    plan = over_hosts("1e1pd:tp4", tmp_path, 2, **on_gpus)
    encoder, leader = plan.instances
    assert (encoder.ranks_elsewhere, encoder.num_ranks, encoder.transport) == (0, 1, "auto")
    assert leader.engine.device == "cuda:1" and leader.rank_devices == ("cuda:0",)
    assert (leader.ranks_elsewhere, leader.num_ranks) == (2, 4)
    assert leader.ranks_endpoint == "tcp://127.0.0.1:7009"
    offered = leader.transport.split(",")
    assert "tcp" in offered and not {"shm", "cuda", "auto"} & set(offered)


@pytest.mark.parametrize(
    ("text", "elsewhere", "settings", "words"),
    [
        ("1pd", 1, {}, "start one instance of more than 1 ranks, such as 1pd:tp2"),
        ("1pd:tp2", 2, {}, "start one instance of more than 2 ranks, such as 1pd:tp3"),
        ("1p:tp2,1d:tp2", 1, {}, "other groups by commands of their own"),
        ("1pd:tp2", -1, {}, "--ranks-elsewhere -1 is of one group"),
        ("1pd:tp2", 1, {"transport": "shm,tcp"}, "shm does not leave a host"),
    ],
)
def test_ranks_elsewhere_that_cannot_be(
    text: str, elsewhere: int, settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        over_hosts(text, tmp_path, elsewhere, **settings)


def test_ranks_elsewhere_need_an_address(tmp_path: Path) -> None:
    placing = Placing(run_dir=str(tmp_path), ranks_elsewhere=1)
    with pytest.raises(ConfigError, match="add --listen tcp://ADDRESS:PORT"):
        plan_topology("1pd:tp2", Settings(), placing, LOG)


def test_ranks_of_another_host_one_for_each_device(tmp_path: Path) -> None:
    placing = Placing("tcp://127.0.0.1:7009", "tcp://127.0.0.1:*", str(tmp_path))
    settings = build_settings(flags={"engine.device": "cuda:2,cuda:3"})
    plan = plan_rank("pd0", settings, placing, LOG)
    assert plan.gateway is None
    assert [(i.instance_id, i.engine.device) for i in plan.instances] == [
        ("rank-of-pd0", "cuda:2"), ("rank-of-pd0-2", "cuda:3"),
    ]  # fmt: skip
    for instance in plan.instances:
        assert instance.rank_of == "pd0" and not instance.roles
        assert instance.gateway_endpoint == "tcp://127.0.0.1:7009"


@pytest.mark.parametrize("given", [{"join": "tcp://127.0.0.1:1"}, {"listen": "tcp://127.0.0.1:*"}])
def test_a_rank_needs_both_addresses(given: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --join tcp://ADDRESS:PORT"):
        plan_rank("pd0", Settings(), Placing(run_dir=str(tmp_path), **given), LOG)


def test_a_rank_of_another_host_needs_a_key(tmp_path: Path) -> None:
    placing = Placing("tcp://10.0.0.1:7009", "tcp://10.0.0.2:*", str(tmp_path))
    with pytest.raises(TransportError, match="needs encryption"):
        plan_rank("pd0", Settings(), placing, LOG)
