"""An agent in this process: which connections are its own, and what it costs when nothing moves."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from epd.messages import Address
from epd.transport.backend import BackendSettings
from epd.transport.base import Written
from epd.transport.host import TcpSocket, tcp_sockets, this_host_id
from epd.transport.nixl.backend import NixlTransferEngine
from epd.transport.nixl.library import LIMIT, Agent, missing
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there")
OTHER = TcpSocket(port=1, state=1, user_timeout_ms=0, is_at_listener=True)


async def test_all_connections_over_which_a_write_came_have_its_limit() -> None:
    """At both ends, whoever opened them."""
    before = set(tcp_sockets())
    owner, writer = (NixlTransferEngine(BackendSettings(name, 1)) for name in ("owner", "writer"))
    region = owner.allocate("pool", 1, 1 << 20)
    assert isinstance(await writer.write([bytes(1 << 20)], region.remote, (0,)), Written)
    links = int(region.remote.locator.partition("/")[0].rpartition(":")[2])
    wire = writer._links._outbound[("owner", 1), f"127.0.0.1:{links}"].result()
    ours = {links, wire._transport.get_extra_info("sockname")[1]}
    theirs = [one for one in set(tcp_sockets()) - before if one.port not in ours and one.state == 1]
    assert len(theirs) >= 2 and all(map(writer._mover.carries, theirs))
    assert not owner._mover.carries(OTHER)
    async with asyncio.timeout(PATIENCE_S):
        while not await owner.fence(Address("writer", 1, ""), this_host_id(), os.getpid()):
            await asyncio.sleep(0.001)
    await writer.close()
    await owner.close()


def test_with_another_limit_every_connection_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("alone-1")
    monkeypatch.setenv(LIMIT, "9s")
    other = Agent("other-1")
    assert [one.carries(OTHER) for one in (agent, other)] == [False, True]
    for one in (agent, other):
        one.give_back()


def spent_s(threads: set[str]) -> float:
    """The time of a processor that they have had."""
    spent = 0
    for thread in threads:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / os.sysconf("SC_CLK_TCK")


async def test_an_agent_sleeps_while_nothing_moves() -> None:
    before = set(os.listdir("/proc/self/task"))
    agent = Agent("idle-1")
    threads = set(os.listdir("/proc/self/task")) - before
    assert threads
    spent, since = spent_s(threads), time.monotonic()
    await asyncio.sleep(0.5)
    assert spent_s(threads) - spent < 0.1 * (time.monotonic() - since)
    agent.give_back()
