"""An answer that goes on elsewhere says, token for token, what it would have said at one place."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.failure import Failure, FailureKind
from epd.frontend import Generation, GenerationUpdate
from epd.messages import SamplingParams
from epd.roles.compose import Engines, Gateway
from epd.tiny import CHECKPOINT
from tests.engine.conftest import chat
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import preparer
from tests.roles.topologies.test_speculation import BLOCK_NBYTES, NGRAM, WISHES, total

MOVES_AFTER = 5  # tokens
LENGTH = 16
ONE_THREAD = EngineConfig(threads=1)
NAMES = ("epd0", "epd1")
LOST = Failure(FailureKind.LOST, "an instance was lost")


def cluster_of(executor: Any, vision: Any, speculative: SpeculativeConfig) -> Cluster:
    """Two, each of which can do all of it."""
    cluster = Cluster()
    config = EngineConfig(
        kv_nbytes=96 * BLOCK_NBYTES, threads=1, speculative=speculative, async_scheduling=True
    )
    for name in NAMES:
        language = build_language(CHECKPOINT, config, executor)
        roles = ("encode", "prefill", "decode")
        cluster.add(name, roles, Engines(vision=vision, language=language), engine=config)
    return cluster


async def answer(gateway: Gateway, asked: Generation, *, moves: bool) -> tuple[list[int], str]:
    """Its tokens and its end; `moves`: where it is decoded is lost to it in its middle, once.  The
    gateway loses it with the token that is due: a reader may be late until the answer has ended."""
    stream = gateway.role.submit(asked)
    machine = gateway.role.current(stream.request_id, 0)
    assert machine is not None
    push = stream.push

    def push_and_lose(update: GenerationUpdate) -> None:
        push(update)
        if machine.attempt == 1 and len(machine.token_ids) >= MOVES_AFTER:
            gateway.role.attempt_failed(machine, {machine.placement.decode.instance_id}, LOST)

    if moves:
        stream.push = push_and_lose  # type: ignore[method-assign]
    tokens: list[int] = []
    finish_reason = ""
    async for update in stream:
        assert update.error is None, update.error
        tokens += update.token_ids
        finish_reason = update.finish_reason
    assert machine.attempt == 1 + moves
    return tokens, finish_reason


async def answers(gateway: Gateway, asked: list[Generation], *, moves: bool) -> list[Any]:
    return await asyncio.gather(*(answer(gateway, one, moves=moves) for one in asked))


async def test_seed_penalties_grammar_and_least_length_go_on_with_and_without_drafts() -> None:
    """And what ends it is what would have: an end token counts only behind `min_tokens`, of which
    the first were said elsewhere."""
    prompt = await preparer().chat(chat("ababababababab cd"))
    plain = SamplingParams(max_tokens=LENGTH)
    ends: Any = {"stop_token_ids": (97,), "min_tokens": MOVES_AFTER + 4}
    wishes = [msgspec.structs.replace(plain, **wish) for wish in WISHES.values()]
    wishes += [msgspec.structs.replace(one, **ends) for one in wishes if not one.grammar]
    asked = [Generation(prompt.token_ids, prompt.items, wish) for wish in wishes]
    executor = build_executor(ONE_THREAD)
    vision = build_vision(CHECKPOINT, ONE_THREAD, executor)
    alone: list[Any] = []
    for speculative in (SpeculativeConfig(), NGRAM):
        cluster = cluster_of(executor, vision, speculative)
        async with cluster.running() as gateway:
            alone = alone or await answers(gateway, asked, moves=False)
            assert await answers(gateway, asked, moves=True) == alone, speculative.method
            await cluster.settle()
        assert bool(total(cluster, "spec_decode_num_accepted_tokens")) is bool(speculative.method)
    assert {reason for _, reason in alone} == {"length", "stop"}
    await executor.close()
