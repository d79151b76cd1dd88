"""What a gateway knows of other processes, and says of them to its supervisor."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.config import GatewayConfig
from epd.frontend import Refused
from epd.runtime.claim import claim_path, claimed, own_life
from epd.runtime.front import _first_join_within_s, _lost_here, _refuse_drain
from epd.transport.host import this_host_id


def test_the_lost_of_this_host_are_told_and_never_oneself() -> None:
    """Fault F79; a process id means nothing elsewhere, and one process for all lives."""

    def instance(pid: int, *, was_lost: bool = True, host_id: str = this_host_id()) -> Any:
        return SimpleNamespace(was_lost=was_lost, info=SimpleNamespace(pid=pid, host_id=host_id))

    instances = [
        instance(7),
        instance(8, was_lost=False),
        instance(9, host_id="elsewhere"),
        instance(os.getpid()),
    ]
    gateway: Any = SimpleNamespace(registry=SimpleNamespace(instances=instances))
    assert _lost_here(gateway) == {7}


def test_a_first_instance_is_awaited_where_one_is_started_or_may_rejoin(tmp_path: Path) -> None:
    own = GatewayConfig(model_dir="", endpoint=f"ipc://{tmp_path}/gateway.sock")
    until_missed_s = own.timing.lost_after_s
    with claimed(str(claim_path(tmp_path, "gateway")), own_life()):
        assert _first_join_within_s(own) == 0.0
        with claimed(str(claim_path(tmp_path, "e0")), own_life()):
            assert _first_join_within_s(own) == until_missed_s
    beyond = GatewayConfig(model_dir="", endpoint="tcp://10.0.0.1:7000")
    assert _first_join_within_s(beyond) == until_missed_s
    topology = GatewayConfig(model_dir="", endpoint=own.endpoint, starts_instances=True)
    assert _first_join_within_s(topology) == math.inf


def test_the_gateways_own_process_is_not_taken_out() -> None:
    with pytest.raises(Refused, match="own process"):
        _refuse_drain("all", 30.0, forced=True, restarts=False, roles=())
