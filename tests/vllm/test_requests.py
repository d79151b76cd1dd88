"""A gateway and an instance that a vLLM server computes for: the server's HTTP side is a fake, all
else is real.  What vLLM itself does is asked in tests/with_vllm."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from llguidance import LLMatcher

from epd.config import GatewayConfig, InstanceConfig
from epd.engine.vision.engine import TorchVisionEngine
from epd.failure import FailureKind
from epd.frontend import Generation, GenerationError, Leave
from epd.messages import (
    CancelTransfer,
    KvOffer,
    MoveRequest,
    RequestFailed,
    RowContract,
    SamplingParams,
    TokenLogprobs,
)
from epd.roles.compose import Engines, Gateway, Instance
from epd.runtime.front import _within
from epd.runtime.worker import make_ports
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import Received
from epd.transport.bus.local import LocalBus, LocalBusHub
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine
from epd.vllm.instance import ServerEngine, ServerInstance
from epd.vllm.requests import ServerRequests
from epd.vllm.server import (
    LOOK_S,
    SHOWS,
    EngineServer,
    ServerChoice,
    objection_to,
    refusal,
    sampling_of,
)
from epd.vllm.shelf import Shelf
from epd.vllm.tickets import WithoutKv
from tests.api import wire
from tests.vllm.fake_server import FakeServer, fake_server

CONTRACT = RowContract(hidden=4, row_width=4, num_deepstack=0, dtype="float32", row_nbytes=16)
ROLES = ("prefill", "decode")
PATIENCE_S = 20.0


until = partial(wire.until, timeout_s=PATIENCE_S)


async def answer_of(
    gateway: Gateway, asked: Generation, begun: Callable[[], None] = lambda: None
) -> list[int] | GenerationError:
    """Tokens of the answer; `begun` is called behind the third."""
    stream = gateway.role.admit()
    gateway.role.start_generation(stream, asked)
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for update in stream:
            if update.error is not None:
                return update.error
            before = len(tokens)
            tokens += update.token_ids
            if before < 3 <= len(tokens):
                begun()
    return tokens


@dataclass
class Cluster:
    gateway: Gateway
    instance: ServerInstance
    server: FakeServer
    shelf: Shelf

    async def ask(self, max_tokens: int = 4, **sampling: Any) -> list[int] | GenerationError:
        """Behind 7, 8, 9."""
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        return await answer_of(self.gateway, Generation((7, 8, 9), (), params))

    async def settle(self) -> None:
        await until(
            lambda: not (self.gateway.is_busy() or self.instance.is_busy() or self.server.num_open)
        )


def _apart(name: str) -> RoutingTransferEngine:
    """As of a process of its own: rows go as bytes."""
    return RoutingTransferEngine(BackendSettings(name, 1), LocalMemory(), [named("shm")])


@contextlib.asynccontextmanager
async def cluster(vision: TorchVisionEngine | None = None) -> AsyncIterator[Cluster]:
    """`vision`: of an encoder beside the server."""
    hub, memory = LocalBusHub(), LocalMemory()
    contract = CONTRACT if vision is None else vision.contract
    async with fake_server() as fake:
        gateway_ports = make_ports(
            LocalBus(hub, "gateway", 1), _within("gateway", 1, memory, "never")
        )
        gateway = Gateway(gateway_ports, GatewayConfig(), "f")
        server = EngineServer(fake.url, lambda grid: "grid", guides=True)
        await server.open()
        engine = ServerEngine(contract, 64 if vision is None else 4096, Shelf(contract), server)
        ports = make_ports(LocalBus(hub, "pd", 1), _apart("pd"))
        config = InstanceConfig(instance_id="pd", roles=ROLES)
        engines = Engines(language=cast("Any", engine), probe=server.probe)
        at = [gateway.actor.address]
        instance = ServerInstance(ports, config, engines, at, "f", "host", 1)
        instances = [instance]
        if vision is not None:
            ports = make_ports(LocalBus(hub, "e", 1), _apart("e"))
            config = InstanceConfig(instance_id="e", roles=("encode",))
            instances += [Instance(ports, config, Engines(vision=vision), at, "f", "host", 1)]
        gateway.start()
        for one in instances:
            await one.test()
            one.start()
        try:
            stages = ["decode"] if vision is None else ["encode", "decode"]
            await until(lambda: all(map(gateway.role.ready().stages.get, stages)))
            yield Cluster(gateway, instance, fake, engine.shelf)
        finally:
            for one in instances:
                await one.close()
            await gateway.close()
            await server.close()


async def test_tokens_come_as_the_server_makes_them_and_end_by_our_own_rule() -> None:
    async with cluster() as at:
        assert await at.ask() == [10, 11, 12, 13]
        assert await at.ask(max_tokens=1) == [10]
        assert await at.ask(stop_token_ids=(11,)) == [10, 11], "the rest is not read"
        await at.settle()
        sampling = at.server.bodies[0]["sampling_params"]
        assert sampling["max_tokens"] == 4 and sampling["ignore_eos"] and "seed" not in sampling


async def test_many_at_once() -> None:
    async with cluster() as at:
        answers = await asyncio.gather(*(at.ask(max_tokens=n) for n in range(1, 33)))
        assert answers == [[*range(10, 10 + n)] for n in range(1, 33)]
        await at.settle()


async def test_a_client_that_leaves_ends_the_servers_work() -> None:
    async with cluster() as at:
        at.server.pause_s = 0.2
        stream = at.gateway.role.admit()
        params = SamplingParams(max_tokens=50)
        at.gateway.role.start_generation(stream, Generation((7,), (), params))
        async with asyncio.timeout(PATIENCE_S):
            async for _ in stream:
                break
        assert at.server.num_open == 1
        stream.cancel(Leave.GONE, "")
        await at.settle()


async def test_a_server_that_ends_an_answer_too_early_is_asked_again_from_there() -> None:
    """The tokens so far are at the end of the next prompt."""
    async with cluster() as at:
        at.server.stops_after = 2
        assert await at.ask(max_tokens=4) == [10, 11, 12, 13]
        first, second = at.server.bodies
        assert second["token_ids"] == [*first["token_ids"], 10, 11]
        assert second["sampling_params"]["max_tokens"] == 2
        await at.settle()


async def test_what_the_server_refuses_is_the_clients_own_error() -> None:
    async with cluster() as at:
        at.server.status = 400
        error = await at.ask()
        assert isinstance(error, GenerationError) and error.status == 400
        assert len(at.server.bodies) == 1, "nobody asks again"
        await at.settle()


async def test_what_a_server_cannot_be_asked_for_never_goes_there() -> None:
    async with cluster() as at:
        error = await at.ask(bad_words=((1,),))
        assert isinstance(error, GenerationError) and error.status == 400
        assert "bad_words" in error.message and not at.server.bodies
        error = await at.ask(max_tokens=62)
        assert isinstance(error, GenerationError) and "--max-model-len" in error.message


def test_a_continued_answer_asks_for_what_is_left_of_it() -> None:
    params = sampling_of(SamplingParams(max_tokens=9, min_tokens=3, temperature=1.0, seed=5), 2)
    assert (params["max_tokens"], params["min_tokens"], params["seed"]) == (7, 1, 5)


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (500, True), (503, True)])
def test_what_a_status_means(status: int, retryable: bool) -> None:
    assert refusal(status, "why").retryable is retryable and "why" in refusal(status, "why").reason


def test_a_server_without_the_route_is_named() -> None:
    assert "--enable-scale-out" in refusal(403, "").reason


def test_plain_sampling_has_no_objection() -> None:
    assert objection_to(SamplingParams(max_tokens=1, temperature=1.0, top_k=3), ()) == ""
    with_grammar = SamplingParams(max_tokens=1, grammar="x")
    assert "grammar" in objection_to(with_grammar, ())
    assert objection_to(with_grammar, (), guides=True) == ""


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (LLMatcher.grammar_from_lark('start: "a"'), {"grammar": 'start: "a"'}),
        (LLMatcher.grammar_from_regex("a+"), {"grammar": "start: /a+/"}),
        (LLMatcher.grammar_from_json_schema('{"const": 1}'), {"json": {"const": 1}}),
    ],
)
def test_each_kind_of_grammar_in_the_words_of_the_server(made: str, wanted: Any) -> None:
    params = sampling_of(SamplingParams(max_tokens=1, grammar=made), 0)
    assert params["structured_outputs"] == wanted


@pytest.mark.parametrize("name", ['"token_id": 7', '"token": "token_id:7"'])
def test_tokens_with_logprobs_of_either_spelling(name: str) -> None:
    """That of 0.32, and that before it."""
    top = f'{{{name}, "logprob": -0.5}}'
    content = f'[{{{name}, "logprob": -0.5, "top_logprobs": [{top}]}}]'
    text = f'{{"token_ids": [7], "logprobs": {{"content": {content}}}}}'
    choice = msgspec.json.decode(text, type=ServerChoice)
    assert choice.tokens() == [TokenLogprobs(7, -0.5, ((7, -0.5),))]


async def test_an_answer_with_a_grammar_goes_on_by_being_made_again() -> None:
    """The server reads a grammar from the first token on; what the client has, it does not get."""
    async with cluster() as at:
        at.server.stops_after = 2
        asked = asyncio.ensure_future(at.ask(max_tokens=4, grammar='start: "a"'))
        async with asyncio.timeout(PATIENCE_S):
            while not at.server.bodies:
                await asyncio.sleep(0.001)
        at.server.stops_after = 9
        assert await asked == [10, 11, 12, 13]
        first, second = at.server.bodies
        assert second["token_ids"] == first["token_ids"]
        assert second["sampling_params"]["max_tokens"] == 4
        await at.settle()


async def test_the_gateway_has_the_list_of_what_the_server_begins_with() -> None:
    """Its death counts against these (F68)."""
    async with cluster() as at:
        at.server.pause_s = 0.3
        asked = asyncio.ensure_future(at.ask(max_tokens=3))
        hands = at.instance.actor.hands
        async with asyncio.timeout(PATIENCE_S):
            while not hands.requests:
                await asyncio.sleep(0.01)
        assert len(hands.requests) == 1
        assert await asked == [10, 11, 12]
        await at.settle()
        assert not hands.requests


async def test_no_kv_comes_to_a_server_or_leaves_it() -> None:
    async with cluster() as at:
        sent: list[Any] = []
        components = at.instance.actor.components
        (attempts,) = (one for one in components if isinstance(one, ServerRequests))
        (without,) = (one for one in components if isinstance(one, WithoutKv))
        attempts.actor.send = lambda to, message, payloads=(): sent.append(message) or True
        offer = KvOffer(
            request_id="r",
            attempt=1,
            room="r/1/kv",
            token_ids=(1,),
            num_prompt_tokens=1,
            num_emitted=0,
            sampling=SamplingParams(max_tokens=2),
            gateway=at.gateway.actor.address,
            deadline_s=1.0,
            layout=None,
        )
        without.on_kv_offer(Received("other", 1, offer, ()))
        move = MoveRequest(
            request_id="r",
            attempt=2,
            former=1,
            decode=at.gateway.actor.address,
            first_token_deadline_s=1.0,
        )
        attempts.on_move_request(Received("gateway", 1, move, ()))
        cancel, failed = sent
        assert isinstance(cancel, CancelTransfer) and cancel.failure.kind is FailureKind.AWAY
        assert isinstance(failed, RequestFailed) and failed.failure.retryable


async def test_an_instance_ends_where_its_server_is_gone() -> None:
    """It may outlive the API server, and must not draw requests that nobody computes."""
    async with cluster() as at:
        lost: list[str] = []
        at.instance.actor.on_device_lost = lost.append
        components = at.instance.actor.components
        (attempts,) = (one for one in components if isinstance(one, ServerRequests))
        await at.server.stop()
        error = await at.ask()
        assert isinstance(error, GenerationError) and error.status == 500
        assert lost and "gone" in lost[0] and not attempts.live()["answers"]


async def test_a_self_test_waits_for_steps_of_the_engine() -> None:
    """Its own, or those of others that it is behind; `/health` answers without any."""
    num_steps = 0
    async with fake_server() as fake:
        server = EngineServer(fake.url, lambda grid: "grid")
        await server.open()
        await server.test(lambda: num_steps)
        fake.stands_still = True
        testing = asyncio.ensure_future(server.test(lambda: num_steps))
        assert not (await asyncio.wait([testing], timeout=2 * LOOK_S))[0]
        num_steps = SHOWS
        async with asyncio.timeout(PATIENCE_S):
            await testing
        fake.stands_still, fake.status = False, 404
        with pytest.raises(OSError, match="--enable-scale-out"):
            await server.test(lambda: num_steps)
        await server.close()
