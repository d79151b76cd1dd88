"""JSON schemas hold for models that never saw JSON: random weights, sampled wildly.

Whatever the weights, every answer is valid; the grammar travels from prefill to decode.  (200 of
the bundled model: e2e/apis/test_structured.py.)  `EPD_SCHEMA_ANSWERS=200` asks for so many here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from epd.api.openai.validation import read_chat
from epd.api.prompts.prepare import Preparer
from epd.config import EngineConfig, GatewayConfig, Limits
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Generation
from epd.roles.compose import Engines, Gateway
from tests.engine.tiny_models import cached_model
from tests.receipt import RECEIPT, is_receipt
from tests.roles.topologies.cluster import Cluster

NUM_ANSWERS = int(os.environ.get("EPD_SCHEMA_ANSWERS", "8"))
AT_ONCE = 40
CONFIG = EngineConfig(threads=1, kv_nbytes=32 << 20)
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe the receipt."}],
    "response_format": {
        "type": "json_schema", "json_schema": {"name": "receipt", "schema": RECEIPT}
    },
    "temperature": 1.3,
    "max_tokens": 400,
}  # fmt: skip


async def asked_of(preparer: Preparer) -> Callable[[int], Generation]:
    """The request by its seed, as the gateway makes it."""
    asked = read_chat(BODY, preparer, Limits())
    assert asked.messages is not None and asked.grammar_source is not None
    prompt = await preparer.chat(asked.messages)
    grammar = await preparer.grammar(asked.grammar_source)

    def with_seed(seed: int) -> Generation:
        sampling = asked.sampling(0, seed, 400, preparer, grammar)
        return Generation(prompt.token_ids, prompt.items, sampling)

    return with_seed


async def answer(gateway: Gateway, preparer: Preparer, asked: Generation) -> tuple[str, str]:
    """Text and finish reason."""
    detokenizer = preparer.detokenizer()
    text = reason = ""
    async for update in gateway.role.submit(asked):
        assert update.error is None, update.error
        text += detokenizer.push(update.token_ids)
        reason = update.finish_reason or reason
    return text + detokenizer.finish(), reason


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("llama", marks=pytest.mark.long)])
async def test_every_answer_follows_its_schema(family: str) -> None:
    directory = cached_model(family)
    executor = build_executor(CONFIG)
    preparer = Preparer(GatewayConfig(model_dir=str(directory)))
    cluster = Cluster()
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        engines = Engines(language=build_language(directory, CONFIG, executor))
        cluster.add(name, (role,), engines, engine=CONFIG)
    if family != "llama":  # what could take images is not ready without an encoder
        tower = build_vision(directory, CONFIG, executor)
        cluster.add("e0", ("encode",), Engines(vision=tower), engine=CONFIG)
    asked = await asked_of(preparer)
    found: list[tuple[str, str]] = []
    async with cluster.running() as gateway:
        for first in range(0, NUM_ANSWERS, AT_ONCE):
            seeds = range(first, min(NUM_ANSWERS, first + AT_ONCE))
            found += await asyncio.gather(*(answer(gateway, preparer, asked(n)) for n in seeds))
        await cluster.settle()
    await preparer.close()
    assert {reason for _, reason in found} == {"stop"}
    assert [text for text, _ in found if not is_receipt(text)] == []
    assert len({text for text, _ in found}) > NUM_ANSWERS // 2
