"""Rows between tiers: a copy that does not end is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd.fsm.encoding import S
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import Settings
from epd_lab.sim.drills.tiers import MEMORY_ONLY
from epd_lab.sim.engine.engines import SimVisionEngine
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask
from tests.roles.simulated import Simulated, simulated


def seen(cluster: Simulated, clients: Clients, name: str) -> bool:
    """A client asks about an image; whether it gets an answer."""
    image = ((1, Image(name)),)
    record = clients.add(Ask(1, cluster.world.loop.now_s, (11, 12, 13), image, 2, 1))
    cluster.pass_time(0.25)
    return bool(record.finish_reason)


@pytest.mark.parametrize(("copy", "state"), [("to_host", S.DEMOTING), ("to_device", S.PROMOTING)])
def test_a_copy_that_hangs_is_given_up(
    copy: str, state: S, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated("1e1p1d", Settings(encode=MEMORY_ONLY)) as cluster:
        role = cluster.instance("e0").encode
        assert role is not None
        begun: list[Any] = []

        async def hangs(engine: Any, rows: Any) -> Any:
            begun.append(rows)
            await asyncio.get_running_loop().create_future()

        clients = Clients(cluster.cluster, ())
        monkeypatch.setattr(SimVisionEngine, copy, hangs)
        names = [f"image{n}" for n in range(12)]
        for name in [*names, *names]:
            seen(cluster, clients, name)
            if begun:
                break
        assert begun, "it never came to that"
        assert [e.state for e in role.encodings.values()].count(state) == 1
        cluster.pass_time(2 * MEMORY_ONLY.cache_load_timeout_s)
        assert state not in [e.state for e in role.encodings.values()]
