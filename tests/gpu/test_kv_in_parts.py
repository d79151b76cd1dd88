"""KV that leaves a GPU while it is computed, by groups of layers, and lands in another pool."""

from __future__ import annotations

from typing import Any

from epd.api.port import Generation
from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.messages import SamplingParams
from epd.roles.compose import Engines
from epd.tiny import CHECKPOINT
from tests.roles.cluster import Cluster
from tests.roles.golden import preparer
from tests.roles.second_turn import FILLER, conversation

SPLIT = [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")]
TOGETHER = [("epd0", "encode", "prefill", "decode")]


async def said_by(
    members: list[tuple[str, ...]], config: EngineConfig, parts: list[int]
) -> list[list[int]]:
    """Answers to both turns; `parts`: how many writes each prompt's KV took."""
    executor = build_executor(config)
    cluster = Cluster()
    for name, *roles in members:
        engines = Engines()
        if "encode" in roles:
            engines.vision = build_vision(CHECKPOINT, config, executor)
        if roles != ["encode"]:
            engines.language = build_language(CHECKPOINT, config, executor)
        instance = cluster.add(name, tuple(roles), engines, engine=config)
        if instance.decode is not None:
            _count(instance.decode, parts)
    answers = []
    async with cluster.running():
        for turn in conversation(FILLER):
            prompt = await preparer().chat(turn)
            generation = Generation(prompt.token_ids, prompt.items, SamplingParams(max_tokens=8))
            said: list[int] = []
            async for update in cluster.gateway.role.submit(generation):
                assert update.error is None, update.error
                said += update.token_ids
            answers.append(said)
        await cluster.settle()
    await executor.close()
    return answers


def _count(decode: Any, parts: list[int]) -> None:
    publish = decode.publish

    async def counted(transfer: Any) -> Any:
        parts.append(len(transfer.parts))
        return await publish(transfer)

    decode.publish = counted


async def test_in_parts_and_at_once_say_the_same(cuda: str) -> None:
    config = EngineConfig(
        device=cuda,
        kv_nbytes=64 << 20,
        kv_landing_nbytes=32 << 20,
        max_step_tokens=1024,
        max_chunk_tokens=512,
    )
    parts: list[int] = []
    split = await said_by(SPLIT, config, parts)
    assert parts[0] >= 3, "chunks and layers went one by one"
    assert split == await said_by(TOGETHER, config, [])
