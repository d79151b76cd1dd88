"""How much sooner a second turn begins: `python -m tests.roles.topologies.second_turn`.

1epd in this process with the embedded model: a first turn of about 2,000 tokens and three images,
then a second one, with the prefix cache and without.  The time to the first token is the gateway's.
"""

from __future__ import annotations

import asyncio
import base64
import time

import msgspec

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Generation
from epd.messages import SamplingParams
from epd.roles.compose import Engines, Gateway
from epd.tiny import CHECKPOINT
from tests.engine.conftest import drawn_image
from tests.engine.driver import png
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import preparer

CONFIG = EngineConfig(kv_nbytes=64 << 20, threads=1)
FILLER = "It was a long day at the harbour and the gauges had to be read twice. " * 26
Body = dict[str, object]


def conversation(text: str, tag: int = 0) -> tuple[list[Body], list[Body]]:
    """Messages of a first turn with three images, and of the second one."""
    images = [base64.b64encode(png(drawn_image(tag + n, 150, 200))).decode() for n in range(3)]
    parts: list[Body] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        for image in images
    ]
    turn: Body = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    more: list[Body] = [
        {"role": "assistant", "content": "Three gauges."},
        {"role": "user", "content": "And what does the second one say?"},
    ]
    return [turn], [turn, *more]


async def first_token_s(gateway: Gateway, messages: list[Body]) -> float:
    prompt = await preparer().chat(messages)
    generation = Generation(prompt.token_ids, prompt.items, SamplingParams(max_tokens=2))
    started = time.perf_counter()
    first_s = 0.0
    async for update in gateway.role.submit(generation):
        assert update.error is None
        first_s = first_s or time.perf_counter() - started
    return first_s


async def measure(*, caching: bool) -> tuple[float, float, int]:
    """Seconds to the first token of both turns, and tokens of the second one."""
    config = msgspec.structs.replace(CONFIG, prefix_caching=caching)
    executor = build_executor(config)
    vision, language = (f(CHECKPOINT, config, executor) for f in (build_vision, build_language))
    cluster = Cluster()
    roles = ("encode", "prefill", "decode")
    cluster.add("epd0", roles, Engines(vision=vision, language=language), engine=config)
    first, second = conversation(FILLER)
    async with cluster.running() as gateway:
        await first_token_s(gateway, [{"role": "user", "content": "warm up"}])
        first_s = await first_token_s(gateway, first)
        second_s = await first_token_s(gateway, second)
    tokens = len((await preparer().chat(second)).token_ids)
    await executor.close()
    return first_s, second_s, tokens


async def main() -> None:
    for caching in (False, True):
        first_s, second_s, tokens = await measure(caching=caching)
        print(
            f"prefix cache {'on' if caching else 'off'}: {tokens} tokens, first turn "
            f"{first_s * 1e3:.0f} ms, second turn {second_s * 1e3:.0f} ms to the first token"
        )


if __name__ == "__main__":
    asyncio.run(main())
