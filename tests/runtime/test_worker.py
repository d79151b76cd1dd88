"""How a worker ends when it cannot serve any more."""

from __future__ import annotations

from epd.engine.base import DeviceLost, EngineError
from epd.roles.compose import Engines
from epd.runtime.worker import EXIT_DEVICE_LOST, Ending, end_with_device
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
