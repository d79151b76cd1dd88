"""What several gateways over the same workers are called, and how these join them."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.cli.start.plan import Placing, plan_role
from epd.config import ConfigError, EngineConfig, LoraConfig, Settings
from tests.cli.test_plan import LOG, role


def test_gateways_that_others_reach_by_address_have_names_of_their_own(tmp_path: Path) -> None:
    def named(**placing: str) -> str:
        gateway = role("gateway", tmp_path, **placing).gateway
        assert gateway is not None
        return gateway.instance_id

    assert named() == "gateway"
    assert named(listen="tcp://127.0.0.1:7000") == "gateway-127-0-0-1-7000"
    assert named(listen="tcp://127.0.0.1:7000", instance_id="g1") == "g1"


def test_a_worker_joins_several_gateways(tmp_path: Path) -> None:
    joined = "tcp://127.0.0.1:7000,tcp://localhost:7001"
    (worker,) = role("encode", tmp_path, join=joined).instances
    assert (worker.gateway_endpoint, worker.endpoint) == (joined, "tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="on another host"):
        role("encode", tmp_path, join="tcp://127.0.0.1:7000,tcp://10.0.0.1:7000")


def test_lists_of_adapters_are_of_one_gateway(tmp_path: Path) -> None:
    settings = Settings(engine=EngineConfig(lora=LoraConfig(runtime_dir=str(tmp_path))))
    joined = Placing("tcp://127.0.0.1:7000,tcp://127.0.0.1:7001", "", str(tmp_path))
    with pytest.raises(ConfigError, match="at the start"):
        plan_role("decode", "", settings, joined, LOG)
