"""However the scheduler cuts and repeats the work, tokens and logits are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.roles.compose import Engines, Gateway
from epd.tiny import CHECKPOINT
from tests.roles.cluster import Cluster
from tests.roles.golden import Question, answer, assert_exact, question

BLOCK_NBYTES = 65536
SMALL = EngineConfig(kv_nbytes=96 * BLOCK_NBYTES, threads=1)
TOPOLOGIES = {
    "1epd": [("epd0", "encode", "prefill", "decode")],
    "1e1p1d": [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")],
}


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    executor = build_executor(SMALL)
    return {"executor": executor, "vision": build_vision(CHECKPOINT, SMALL, executor)}


@asynccontextmanager
async def serving(
    shared: dict[str, Any], topology: str = "1epd", **settings: Any
) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    config = msgspec.structs.replace(SMALL, **settings)
    for name, *roles in TOPOLOGIES[topology]:
        engines = Engines(vision=shared["vision"] if "encode" in roles else None)
        if "prefill" in roles or "decode" in roles:
            engines.language = build_language(CHECKPOINT, config, shared["executor"])
        cluster.add(name, tuple(roles), engines, engine=config)
    async with cluster.running():
        yield cluster
        await cluster.settle()


def num_preemptions(cluster: Cluster) -> int:
    batches = [instance.requests for instance in cluster.instances.values()]
    return sum(batch.num_preemptions for batch in batches if batch is not None)


async def ask_all(gateway: Gateway, asked: list[Question]) -> None:
    said = await asyncio.gather(*(answer(gateway, one) for one in asked))
    for tokens, one in zip(said, asked, strict=True):
        assert_exact(tokens, one)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1024])
async def test_any_chunk_size(chunk: int, shared: dict[str, Any]) -> None:
    """Text and pictures together, prompts in chunks between decodes."""
    asked = [await question("hello"), await question("what?", 1), await question("both", 2)]
    async with serving(shared, max_chunk_tokens=chunk) as cluster:
        await ask_all(cluster.gateway, asked)
        assert num_preemptions(cluster) == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("chunk", [7, 1024])
async def test_who_gives_way_says_the_same(
    chunk: int, topology: str, shared: dict[str, Any]
) -> None:
    """F24: blocks for one answer and a half: the younger ones are computed again and again."""
    texts = ["hello", "a longer question than that", "why?", "how?"]
    asked = [await question(text, max_tokens=60) for text in texts]
    asked.append(await question("what?", 1, max_tokens=20))
    needed = max(len(q.generation.token_ids) + len(q.token_ids) for q in asked)
    blocks = needed * 2 // 16
    async with serving(
        shared, topology, max_chunk_tokens=chunk, kv_nbytes=blocks * BLOCK_NBYTES
    ) as cluster:
        await ask_all(cluster.gateway, asked)
        assert num_preemptions(cluster) >= 2
