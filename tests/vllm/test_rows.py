"""Rows of this project's encoder at an instance that a vLLM server computes for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_vision
from epd.engine.vision.engine import TorchVisionEngine
from epd.messages import SamplingParams
from epd.tiny import CHECKPOINT
from epd.vllm.halves import load
from tests.roles.topologies.golden import question
from tests.vllm.test_requests import answer_of, cluster, until

SAMPLING = SamplingParams(max_tokens=4)


async def rows_at_a_server(vision: TorchVisionEngine, device: str) -> None:
    """What a worker's half loads onto its device is what the tower makes, bit by bit."""
    asked = await question("what?", 2)
    generation = replace(asked.generation, sampling=SAMPLING)
    images = {item.mm_hash: item for item in generation.items}
    cache: dict[str, torch.Tensor] = {}
    async with cluster(vision) as at:
        at.server.stands_still = True
        asking = asyncio.ensure_future(answer_of(at.gateway, generation))
        await until(lambda: all(at.shelf.find(key) is not None for key in images))
        orders = {key: rows for key in images if (rows := at.shelf.find(key)) is not None}
        load(orders, cache, torch.device(device))
        at.server.stands_still = False
        assert isinstance(await asking, list)
        await at.settle()
    assert cache.keys() == images.keys()
    for key, item in images.items():
        patches = await vision.preprocess(item.image, item.grid_thw)
        (rows,) = await vision.encode([patches])
        assert cache[key].device.type == device
        assert torch.equal(cache[key].cpu().flatten(), rows.tensor.cpu().flatten())


async def test_rows_are_those_of_the_tower() -> None:
    config = EngineConfig(threads=1)
    await rows_at_a_server(build_vision(CHECKPOINT, config, build_executor(config)), "cpu")
