"""KV that leaves a GPU while it is computed, by groups of layers, and lands in another pool."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from epd.api.prompts.prepare import Preparer
from epd.config import EngineConfig, GatewayConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Generation
from epd.messages import SamplingParams
from epd.roles.compose import Engines
from epd.tiny import CHECKPOINT
from tests.gpu.test_engine import Counted
from tests.roles.topologies.cluster import Cluster

FILLER = "It was a long day at the harbour and the gauges had to be read twice. " * 26

SPLIT = [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")]
TOGETHER = [("epd0", "encode", "prefill", "decode")]


def conversation() -> list[list[dict[str, Any]]]:
    """Messages of two turns: about 2,000 tokens and an image, then a few more."""
    data = io.BytesIO()
    Image.linear_gradient("L").resize((150, 200)).convert("RGB").save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": FILLER}]
    first = [{"role": "user", "content": parts}]
    more = [{"role": "assistant", "content": "One."}, {"role": "user", "content": "And now?"}]
    return [first, [*first, *more]]


async def said_by(
    members: list[tuple[str, ...]], config: EngineConfig, parts: list[int], replays: list[int]
) -> list[list[int]]:
    """Answers to both turns; `parts`: how many writes each prompt's KV took; `replays`: tokens of
    the captured steps with prompts."""
    executor = build_executor(config)
    cluster = Cluster()
    for name, *roles in members:
        engines = Engines()
        if "encode" in roles:
            engines.vision = build_vision(CHECKPOINT, config, executor)
        if roles != ["encode"]:
            engines.language = build_language(CHECKPOINT, config, executor)
            forward = engines.language.forward
            forward.prompt_graphs = Counted(forward.prompt_graphs, replays)
        instance = cluster.add(name, tuple(roles), engines, engine=config)
        if instance.decode is not None:
            _count(instance.decode, parts)
    answers = []
    preparer = Preparer(GatewayConfig(model_dir=str(CHECKPOINT)))
    async with cluster.running():
        for turn in conversation():
            prompt = await preparer.chat(turn)
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
    replays: list[int] = []
    split = await said_by(SPLIT, config, parts, replays)
    assert parts[0] >= 3, "chunks and layers went one by one"
    assert len(replays) >= 4, "steps whose KV leaves meanwhile are replayed, too"
    assert split == await said_by(TOGETHER, config, [], [])
