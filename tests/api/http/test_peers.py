"""Several gateways: each key has one of them, and whoever is asked hands its requests on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.http.peers import Peer, Peers, ranked
from epd.api.server import ApiServer
from epd.config import AccessConfig, ConfigError, GatewayConfig
from epd.frontend import Refused
from tests.api.fakes import FakeFrontend, said, serving
from tests.api.wire import HI, Wire, exchange, request, until

STREAM = {**HI, "stream": True}
PEERS = st.lists(st.tuples(st.ip_addresses().map(str), st.integers(1, 65535)), unique=True)


def keyed(key: str, **more: str) -> bytes:
    return request(STREAM, idempotency_key=key, **more)


@given(st.text(), PEERS)
def test_only_keys_of_one_that_is_gone_move(key: str, peers: list[Peer]) -> None:
    order = ranked(key, peers)
    assert sorted(order) == sorted(peers) and order == ranked(key, peers[::-1])
    for gone in peers:
        assert ranked(key, [p for p in peers if p != gone]) == [p for p in order if p != gone]


def test_keys_are_shared_out_evenly() -> None:
    peers = [("10.0.0.1", 8000), ("10.0.0.2", 8000), ("10.0.0.3", 8000)]
    first = [ranked(f"key {n}", peers)[0] for n in range(900)]
    assert all(250 < first.count(peer) < 350 for peer in peers)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateways(
    *frontends: FakeFrontend, dead: bool = False, key: str = ""
) -> AsyncIterator[list[ApiServer]]:
    """Each knows all, and `dead` that nobody is at one more address."""
    ports = [free_port() for _ in frontends]
    urls = tuple(f"http://127.0.0.1:{port}" for port in [*ports, *[free_port()] * dead])
    access = AccessConfig(api_keys=(key,) if key else ())
    async with AsyncExitStack() as stack:
        yield [
            (await stack.enter_async_context(serving(f, access=access, peers=urls, port=port)))[0]
            for f, port in zip(frontends, ports, strict=True)
        ]


def texts(frontends: list[FakeFrontend]) -> list[int]:
    return [len(frontend.generations) for frontend in frontends]


@pytest.mark.parametrize("dead", [False, True])
async def test_a_key_runs_once_wherever_it_is_asked(*, dead: bool) -> None:
    frontends = [FakeFrontend([said("one", "stop")]), FakeFrontend([said("two", "stop")])]
    async with gateways(*frontends, dead=dead, key="secret") as servers:
        for n in range(18):
            raw = keyed(f"{n}", authorization="Bearer secret", x_request_id="mine")
            answers = [await exchange(server, raw) for server in servers]
            assert {status for status, _, _ in answers} == {200}
            assert {headers["x-request-id"] for _, headers, _ in answers} == {"mine"}
            assert len({body for _, _, body in answers}) == 1 and b"[DONE]" in answers[0][2]
        assert sum(texts(frontends)) == 18 and min(texts(frontends)) > 0
        whole = request(HI, idempotency_key="w", authorization="Bearer secret")
        bodies = {(await exchange(server, whole))[2] for server in servers}
        assert len(bodies) == 1 and json.loads(bodies.pop())["choices"]
        wrong = await exchange(servers[0], keyed("0", authorization="Bearer other"))
        assert wrong[0] == 401


async def test_a_retry_at_another_gateway_joins_what_runs() -> None:
    """Whoever handed it on is gone with its connection; the generation goes on for a while."""
    gate = asyncio.Event()
    frontends = [FakeFrontend([said("he"), gate, said("llo", "stop")]) for _ in range(2)]
    async with gateways(*frontends) as servers:
        for n in range(16):  # its owner is one or the other
            gate.clear()
            before = sum(texts(frontends))
            wire = await Wire.to(servers[0])
            wire.writer.write(keyed(f"{n}"))
            await wire.head()
            wire.drop()
            await until(lambda: not servers[0]._state.connections)
            retry = await Wire.to(servers[1])
            retry.writer.write(keyed(f"{n}"))
            await retry.head()
            gate.set()
            async with asyncio.timeout(5):
                assert b"[DONE]" in await retry.reader.readuntil(b"[DONE]")
            assert sum(texts(frontends)) == before + 1
    assert min(texts(frontends)) > 0


async def test_one_that_refuses_with_503_is_not_the_end() -> None:
    frontends = [FakeFrontend([said("here", "stop")]), FakeFrontend()]
    async with gateways(*frontends) as servers:
        frontends[1].refused[0] = Refused(503, "the gateway is shutting down")
        for n in range(6):
            assert b"here" in (await exchange(servers[0], keyed(f"{n}")))[2]


async def test_an_answer_that_breaks_off_ends_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.api.server.GRACE_S", 0.1)
    frontends = [FakeFrontend([said("he"), asyncio.Event()]) for _ in range(2)]
    async with gateways(*frontends) as servers:
        for n in range(20):
            wire = await Wire.to(servers[0])
            wire.writer.write(keyed(f"{n}"))
            await wire.head()
            if frontends[1].generations:
                break
            wire.drop()
        for connection in list(servers[1]._state.connections):
            connection.transport.abort()
        body = await wire.reader.readuntil(b"send it again")
        assert b"[DONE]" not in body


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "http://", "ftp://a", "http://a:8000/v1"])
def test_an_address_has_a_form(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Peers(GatewayConfig(peers=(url,)), lambda: 8000)
