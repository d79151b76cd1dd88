"""Prefill and decode at two vLLM servers, whose HTTP sides are fakes: all else is real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

from epd.config import GatewayConfig, InstanceConfig, Timing
from epd.failure import FailureKind
from epd.frontend import Generation, GenerationError, Leave
from epd.messages import SamplingParams
from epd.roles.compose import Engines, Gateway
from epd.runtime.front import _within
from epd.runtime.worker import make_ports
from epd.transport.bus.local import LocalBus, LocalBusHub
from epd.transport.local import LocalMemory
from epd.vllm.instance import ServerEngine, ServerInstance
from epd.vllm.server import EngineServer
from epd.vllm.shelf import Shelf
from epd.vllm.tickets import LAYOUT, MAX_NBYTES, NUM_TICKETS, TicketRequests
from tests.vllm.fake_server import FakeServer, fake_server
from tests.vllm.test_requests import CONTRACT, PATIENCE_S, answer_of, until

ROLES = {"p": ("prefill",), "d": ("decode",)}
TIMING = Timing(
    heartbeat_interval_s=0.05, suspect_after_s=0.3, lost_after_s=0.6, topology_timeout_s=1.0
)


@dataclass
class Apart:
    gateway: Gateway
    instances: dict[str, ServerInstance]
    servers: dict[str, FakeServer]

    async def ask(
        self, max_tokens: int = 4, begun: Callable[[], None] = lambda: None, **sampling: Any
    ) -> list[int] | GenerationError:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        return await answer_of(self.gateway, Generation((7, 8, 9), (), params), begun)

    async def settle(self) -> None:
        """All is given back, at both ends."""
        await until(
            lambda: (
                not (
                    self.gateway.is_busy()
                    or any(one.is_busy() for one in self.instances.values())
                    or any(one.num_open for one in self.servers.values())
                )
            )
        )

    def bodies(self, name: str) -> list[dict[str, Any]]:
        return self.servers[name].bodies


@contextlib.asynccontextmanager
async def apart(*names: str) -> AsyncIterator[Apart]:
    hub, memory = LocalBusHub(), LocalMemory()
    async with contextlib.AsyncExitStack() as held:
        ports = make_ports(LocalBus(hub, "gateway", 1), _within("gateway", 1, memory, "never"))
        gateway = Gateway(ports, GatewayConfig(timing=TIMING), "f")
        gateway.start()
        held.push_async_callback(gateway.close)
        at = Apart(gateway, {}, {})
        for name in names:
            fake = at.servers[name] = await held.enter_async_context(fake_server())
            server = EngineServer(fake.url, lambda grid: "grid")
            await server.open()
            held.push_async_callback(server.close)
            engine = ServerEngine(CONTRACT, 64, Shelf(CONTRACT), server, LAYOUT)
            its = make_ports(LocalBus(hub, name, 1), _within(name, 1, memory, "auto"))
            roles = ROLES[name[0]]
            config = InstanceConfig(instance_id=name, roles=roles, timing=TIMING)
            engines = Engines(language=cast("Any", engine), probe=server.probe)
            to = [gateway.actor.address]
            instance = ServerInstance(its, config, engines, to, "f", "host", 1)
            at.instances[name] = instance
            await instance.test()
            instance.start()
            held.push_async_callback(instance.close)
        await until(lambda: sum(map(len, gateway.role.ready().stages.values())) >= len(names))
        yield at


async def test_decode_gets_what_prefill_was_given() -> None:
    async with apart("p", "d") as at:
        assert await at.ask() == [10, 11, 12, 13]
        (prefill,), (decode,) = at.bodies("p"), at.bodies("d")
        assert prefill["sampling_params"]["max_tokens"] == 1 and not prefill["stream"]
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert decode["kv_transfer_params"] == {
            "remote_engine_id": at.servers["p"].url,
            "number": 1,
        }
        assert decode["token_ids"] == prefill["token_ids"] == [7, 8, 9]
        assert decode["sampling_params"]["max_tokens"] == 4
        await at.settle()


async def test_what_ends_with_its_first_token_ends_at_prefill() -> None:
    async with apart("p", "d") as at:
        assert await at.ask(max_tokens=1) == [10]
        assert await at.ask(stop_token_ids=(10,)) == [10]
        assert not at.bodies("d")
        assert await at.ask(min_tokens=3) == [10, 11, 12, 13]
        assert at.bodies("p")[-1]["sampling_params"]["min_tokens"] == 1
        await at.settle()


async def test_many_at_once_and_each_has_its_own_ticket() -> None:
    async with apart("p", "d") as at:
        answers = await asyncio.gather(*(at.ask(max_tokens=n) for n in range(2, 66)))
        assert answers[:60] == [[*range(10, 10 + n)] for n in range(2, 62)]
        tickets = [body["kv_transfer_params"]["number"] for body in at.bodies("d")]
        assert len(set(tickets)) == len(tickets)
        await at.settle()


async def test_more_than_there_are_tickets_wait_in_line() -> None:
    async with apart("p", "d") as at:
        components = at.instances["d"].actor.components
        (pool,) = (one.pool for one in components if isinstance(one, TicketRequests))
        taken = pool.take(NUM_TICKETS - 1)
        assert taken is not None
        answers = await asyncio.gather(*(at.ask() for _ in range(8)))
        assert answers == [[10, 11, 12, 13]] * 8
        pool.give_back(taken)
        await at.settle()


async def test_a_server_that_gives_no_ticket_is_one_clear_error() -> None:
    async with apart("p", "d") as at:
        at.servers["p"].gives_tickets = False
        error = await at.ask()
        assert isinstance(error, GenerationError) and error.kind is FailureKind.INTERNAL
        assert len(at.bodies("p")) == 1 and not at.bodies("d")
        await at.settle()


async def test_a_first_token_that_decode_does_not_sample_is_computed_behind() -> None:
    """The client has it: the next attempt goes on from there."""
    async with apart("p", "d0", "d1") as at:
        for name in ("d0", "d1"):
            at.servers[name].shift = 5
        asked = asyncio.ensure_future(at.ask())
        await until(lambda: len(at.bodies("p")) >= 2)
        for name in ("d0", "d1"):
            at.servers[name].shift = 0
        tokens = await asked
        assert tokens == [10, 11, 12, 13]
        assert at.bodies("p")[1]["token_ids"] == [7, 8, 9, 10]
        await at.settle()


async def test_decode_that_ends_in_the_middle_is_followed_by_another() -> None:
    async with apart("p", "d0", "d1") as at:
        for name in ("d0", "d1"):
            at.servers[name].stops_after = 2
        tokens = await at.ask(max_tokens=4)
        assert tokens == [10, 11, 12, 13]
        assert [body["token_ids"][3:] for body in at.bodies("p")] == [[], [10, 11]]
        await at.settle()


async def test_a_client_that_leaves_ends_it_at_both() -> None:
    async with apart("p", "d") as at:
        at.servers["d"].pause_s = 0.1
        stream = at.gateway.role.admit()
        at.gateway.role.start_generation(
            stream, Generation((7,), (), SamplingParams(max_tokens=50))
        )
        async with asyncio.timeout(PATIENCE_S):
            async for _ in stream:
                break
        stream.cancel(Leave.GONE, "")
        await at.settle()


async def test_a_lost_decode_instance_costs_a_pause() -> None:
    async with apart("p", "d0", "d1") as at:
        for name in ("d0", "d1"):
            at.servers[name].pause_s = 0.05

        def kill() -> None:
            (name,) = (n for n in ("d0", "d1") if at.bodies(n))
            lost.append(name)
            ending.append(asyncio.ensure_future(at.instances[name].close()))

        lost: list[str] = []
        ending: list[asyncio.Future[None]] = []
        assert await at.ask(max_tokens=20, begun=kill) == [*range(10, 30)]
        assert lost and len(at.bodies("p")) == 2
        await asyncio.gather(*ending)


async def test_a_lost_prefill_instance_costs_a_pause() -> None:
    """It is asked, and ends before it has answered."""
    async with apart("p0", "p1", "d") as at:
        for name in ("p0", "p1"):
            at.servers[name].pause_s = 0.5
        asked = asyncio.ensure_future(at.ask())
        await until(lambda: at.bodies("p0") or at.bodies("p1"))
        (lost,) = (name for name in ("p0", "p1") if at.bodies(name))
        await at.instances[lost].close()
        assert await asked == [10, 11, 12, 13]
        (other,) = {"p0", "p1"} - {lost}
        assert len(at.bodies(other)) == 1


async def test_kv_that_does_not_come_costs_a_pause_and_another_ticket() -> None:
    """A prefill server stands still: it has given tickets, and nobody can read by them."""
    async with apart("p0", "p1", "d") as at:
        fake = at.servers["d"]
        fake.silent = at.servers["p0"].url
        answers = asyncio.gather(*(at.ask() for _ in range(8)))
        async with asyncio.timeout(PATIENCE_S):
            while len(at.bodies("d")) < 8:
                await asyncio.sleep(0.001)
        await at.instances["p0"].close()
        assert await answers == [[10, 11, 12, 13]] * 8
        again = [body for body in at.bodies("d") if body["token_ids"] == [7, 8, 9, 10]]
        assert again and all(
            body["kv_transfer_params"]["remote_engine_id"] == at.servers["p1"].url for body in again
        )


async def test_kv_that_never_comes_is_one_clear_error() -> None:
    async with apart("p", "d") as at:
        at.servers["d"].silent = at.servers["p"].url
        error = await at.ask(max_tokens=40)
        assert isinstance(error, GenerationError) and error.kind is FailureKind.ENGINE
        assert 1 < len(at.bodies("d")) <= TIMING.max_attempts, "each attempt has its own ticket"
        await at.settle()


async def test_without_another_it_is_one_clear_error() -> None:
    async with apart("p", "d") as at:
        at.servers["d"].pause_s = 0.05
        ending: list[asyncio.Future[None]] = []

        def kill() -> None:
            ending.append(asyncio.ensure_future(at.instances["d"].close()))

        error = await at.ask(max_tokens=40, begun=kill)
        assert isinstance(error, GenerationError) and error.status == 503, error
        assert "decode" in error.message
        await asyncio.gather(*ending)


def test_a_ticket_has_room_for_a_long_prompt() -> None:
    assert len(str([[*range(100_000, 100_000 + 128_000 // 16)]])) < MAX_NBYTES
