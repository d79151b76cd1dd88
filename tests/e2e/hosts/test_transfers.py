"""Transports alone between two hosts: bytes, and how soon they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.transport.backends import named
from epd_lab.bench.chaos.hosts import two_hosts, unable
from epd_lab.bench.transports.soak import Soak, SoakHost, SoakPlan, judge
from epd_lab.bench.transports.words import Remote

CHILD = "tests.e2e.hosts.stream_child"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unable()), reason=unable()),
    pytest.mark.long,
]


@pytest.mark.parametrize("backend", ["tcp", "mooncake", "nixl"])
async def test_either_side_is_killed_and_every_item_arrives(backend: str, tmp_path: Path) -> None:
    """Fences of a host's dead life hold by what its next life attests."""
    if reason := named(backend).lacks():
        pytest.skip(reason)
    with two_hosts() as cable:
        owner, writer = (SoakHost(host.enter, host.address) for host in cable.hosts)
        plan = SoakPlan(backend, 4000, kills=40, owner=owner, writer=writer)
        found = await Soak(plan, str(tmp_path)).run()
        left = [path.name for host in cable.hosts for path in host.shm.iterdir()]
    print(f"{backend}: {found['took_s']:.0f} s, {found['counts']}, {found['samples'][-1]}")
    assert judge(found) == [] == left


async def test_rows_over_tcp_come_as_fast_as_a_plain_stream() -> None:
    """Where the cable is the limit; without one both are printed."""
    with two_hosts() as cable:
        sides = [Remote(CHILD, host.enter) for host in cable.hosts]
        started = [
            await side.ask("start", name=host.name, host=host.address, backend="tcp")
            for side, host in zip(sides, cable.hosts, strict=True)
        ]
        (target, port), here = started[0], sides[1]

        async def rates(count: int) -> tuple[float, float]:
            """Of ours and of a plain stream, GB/s: the best of turns."""
            turns = [
                (
                    await here.ask("write", target=target, count=count),
                    await here.ask("pour", host=cable.hosts[0].address, port=port, count=count),
                )
                for _ in range(5)
            ]
            ours, plain = map(max, zip(*turns, strict=True))
            return ours, plain

        await rates(4)  # connects
        free = await rates(32)
        cable.limit(2)
        limited = await rates(16)
        for side in sides:
            await side.close()
    print(f"GB/s, ours and plain: {free}; over a cable of 2 Gbit/s: {limited}")
    assert limited[0] >= 0.9 * limited[1]
    assert limited[1] < 0.26, "the cable has not the limit that was set"
