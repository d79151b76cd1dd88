"""The second turn of a long conversation computes, moves and encodes only what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Generation
from epd.messages import Grant, SamplingParams
from epd.roles.compose import Engines
from epd.roles.steps.requests import Requests
from epd.tiny import CHECKPOINT
from tests.roles.decode.test_landing import Staged
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import preparer
from tests.roles.topologies.second_turn import FILLER, Body, conversation
from tests.roles.topologies.test_exactness import num_encoded

CONFIG = EngineConfig(kv_nbytes=24 << 20, threads=1)
ROLES = {"e": "encode", "p": "prefill", "d": "decode"}
BLOCK = 16
SLOTS = 4  # per block: the tiny model has four layers


class Spy:
    """The grants of every decode instance: how many blocks it wanted."""

    def __init__(self, cluster: Cluster) -> None:
        self.granted: list[Grant] = []
        for instance in cluster.instances.values():
            if instance.decode is not None:
                self._watch(instance.decode)

    def _watch(self, decode: Any) -> None:
        grant = decode.grant

        def seen(transfer: Any) -> Grant:
            self.granted.append(grant(transfer))
            return self.granted[-1]

        decode.grant = seen


class Turn(NamedTuple):
    num_prompt: int
    num_cached: list[int]  # as each update tells it
    said: list[int]


async def turn_of(cluster: Cluster, messages: list[Body]) -> Turn:
    prompt = await preparer().chat(messages)
    generation = Generation(prompt.token_ids, prompt.items, SamplingParams(max_tokens=4))
    turn = Turn(len(prompt.token_ids), [], [])
    async for update in cluster.gateway.role.submit(generation):
        assert update.error is None, update.error
        turn.num_cached.append(update.num_cached)
        turn.said.extend(update.token_ids)
    return turn


def totals(cluster: Cluster, role: str, kind: str) -> int:
    batches: list[Requests] = [
        i.requests for n, i in cluster.instances.items() if n[0] == role and i.requests is not None
    ]
    return sum(batch.totals[kind] for batch in batches)


@asynccontextmanager
async def plain(config: EngineConfig, executor: Any) -> AsyncIterator[Cluster]:
    """Everything in one instance, which has computed nothing yet."""
    cluster = Cluster()
    vision, language = (f(CHECKPOINT, config, executor) for f in (build_vision, build_language))
    engines = Engines(vision=vision, language=language)
    cluster.add("epd0", tuple(ROLES.values()), engines, engine=config)
    async with cluster.running():
        yield cluster


@pytest.mark.parametrize(
    ("topology", "staged"),
    [
        ("2e2p2d", True),
        pytest.param("1e1p1d", False, marks=pytest.mark.long),
        pytest.param("1e1p1d", True, marks=pytest.mark.long),
        pytest.param("2e2p2d", False, marks=pytest.mark.long),
    ],
)
async def test_only_what_is_new(topology: str, staged: bool) -> None:
    """2,236 tokens and three images; in 2e2p2d another conversation is busy in between."""
    config = CONFIG
    executor = build_executor(config)
    vision = build_vision(CHECKPOINT, config, executor)
    cluster = Cluster(placement="fixed")
    for letter, role in ROLES.items():
        for n in range(int(topology[0])):
            engines = Engines(vision=vision) if letter == "e" else Engines()
            if letter != "e":
                language: Any = build_language(CHECKPOINT, config, executor)
                engines.language = Staged(language, 256) if staged else language
            cluster.add(f"{letter}{n}", (role,), engines, engine=config)
    async with cluster.running():
        spy = Spy(cluster)
        first, second = conversation(FILLER)
        num_first, num_cached, _ = await turn_of(cluster, first)
        assert not any(num_cached)
        await turn_of(cluster, [{"role": "user", "content": "something else " * 40}])
        encoded, hits = num_encoded(cluster), totals(cluster, "p", "prefix_cache_hit_tokens")
        num_second, num_cached, said = await turn_of(cluster, second)
        await cluster.settle()
    assert num_second > 2000
    assert num_encoded(cluster) == encoded == 3
    found = totals(cluster, "p", "prefix_cache_hit_tokens") - hits
    shared = num_first - 1 - BLOCK  # the template ends a prompt where an answer begins
    assert found >= shared, "prefill computes only what is new"
    assert num_cached[0] == found, "and the client is told, once"
    assert not any(num_cached[1:])
    grant = spy.granted[-1]
    num_slots = -(-num_second // BLOCK) * SLOTS
    assert grant.num_held * BLOCK >= shared * SLOTS
    assert grant.num_held + len(grant.slots) == num_slots, "and the rest is moved"
    async with plain(config, executor) as alone:
        assert (await turn_of(alone, second)).said == said, "and the answer is the same"
    await executor.close()
