"""How a worker ends when it cannot serve any more."""

from __future__ import annotations

import os
import subprocess
import sys

from epd.engine.base import DeviceLost, EngineError
from epd.messages import Address, InstanceInfo
from epd.roles.compose import Engines
from epd.runtime.worker import EXIT_DEVICE_LOST, Ending, end_with_device, is_gone
from epd.transport.host import this_host_id
from epd_lab.bench.null_engine import NullLanguage
from tests.roles.cluster import Cluster


async def test_it_ends_with_its_device() -> None:
    """Fault F49: not after a failed step, but after one that says that all others will fail."""
    cluster = Cluster()
    instance = cluster.add("pd0", ("prefill", "decode"), Engines(language=NullLanguage()))
    ending = Ending()
    told: list[tuple[str, str]] = []
    end_with_device(instance, ending, lambda state, detail: told.append((state, detail)))
    instance.actor.fault("step", EngineError("out of memory"))
    assert not ending.now.is_set() and told == []
    instance.actor.fault("step", DeviceLost("an illegal memory access"))
    assert ending.now.is_set() and ending.exit_status == EXIT_DEVICE_LOST
    assert told == [("device lost", "an illegal memory access")]
    await instance.close()
    await cluster.gateway.close()


def test_only_of_a_process_of_this_host_it_is_known_that_it_is_gone() -> None:
    """F78: the same number elsewhere is another process."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for pid, host_id, gone in (
        (ended.pid, this_host_id(), True),
        (os.getpid(), this_host_id(), False),
        (ended.pid, "elsewhere", False),
    ):
        address = Address("e0", 1, "")
        info = InstanceInfo(address=address, roles=(), host_id=host_id, pid=pid)
        assert is_gone(info) is gone
