"""What the ranks of a group are asked to do together, each on a GPU of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from epd.config import EngineConfig
from epd.engine.base import EncodeFailure
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.forward import FusedForward
from epd.engine.sharding import WHOLE, Shard
from tests.engine.driver import Driver
from tests.groups.device.ranks_cases import Case, LetIn, answers_from_slots, batch_of, steps_let_in

MAX_RUNNING = 16


@cache
def _driver(
    directory: Path, shard: Shard, dtype: str, *, shared: bool, quantum_ms: float = 0.0
) -> Driver:
    """`shared`: the tower is."""
    config = EngineConfig(
        device=f"cuda:{shard.rank}",
        dtype=dtype,
        kv_nbytes=32 << 20,
        threads=2,
        max_quantum_ms=quantum_ms,
        max_captured_tokens=256,  # each size is captured anew; larger steps are launched
    )
    executor = build_executor(config)
    towers = shard if shared else WHOLE
    vision = build_vision(directory, config, executor, max_batch_patches=1024, shard=towers)
    return Driver(
        directory, vision, build_language(directory, config, executor, MAX_RUNNING, shard=shard)
    )


def answers(
    shard: Shard, directory: Path, cases: Sequence[Case], num_tokens: int, chunk: int
) -> list[list[int]]:
    """Greedy tokens in fp32 of all requests together; steps are replayed from graphs."""

    async def play() -> list[list[int]]:
        there = _driver(directory, shard, "float32", shared=False)
        forward = there.language.forward
        assert isinstance(forward, FusedForward) and forward.graphs and forward.prompt_graphs
        requests = [
            await there.request(str(i), *case, max_tokens=num_tokens)
            for i, case in enumerate(cases)
        ]
        said = await there.run(requests, chunk)
        there.release(requests)
        return said

    return asyncio.run(play())


def from_slots(
    shard: Shard, directory: Path, cases: Sequence[Case], kinds: Sequence[str], chunk: int
) -> list[list[int]]:
    """Answers where rows lie in slots of the ranks, which are the host's and are pinned."""
    there = _driver(directory, shard, "float32", shared=False)
    return answers_from_slots(there, shard, cases, kinds, chunk)


def logits(shard: Shard, directory: Path, cases: Sequence[Case]) -> list[list[float]]:
    """In bf16, behind each prompt alone."""

    async def play() -> list[list[float]]:
        there = _driver(directory, shard, "bfloat16", shared=False)
        found = []
        for case in cases:
            request = await there.request("r", *case)
            found.append(there.language.logits([request.next_step(4096)])[0].cpu().tolist())
            there.release([request])
        return found

    return asyncio.run(play())


def encoded(shard: Shard, directory: Path, images: Sequence[Any]) -> list[list[list[float]]]:
    """Rows of a batch; only the first rank has pixels, and rows."""

    async def play() -> list[list[list[float]]]:
        vision = _driver(directory, shard, "float32", shared=True).vision
        assert vision is not None
        batch = await batch_of(vision, directory, images, -1, shard)
        rows = await vision.encode(batch)
        assert not any(isinstance(each, EncodeFailure) for each in rows)
        torch.cuda.synchronize()
        return [each.tensor.cpu().tolist() for each in rows]  # type: ignore[union-attr]

    return asyncio.run(play())


@cache
def _cut_driver(directory: Path, shard: Shard) -> Driver:
    """With a tower in slices.  Later a quantum is longer: steps between slices have been seen."""
    there = _driver(directory, shard, "float32", shared=True, quantum_ms=0.001)
    assert there.vision is not None and there.vision.num_turns([there.vision._image(1)]) > 1
    return there


def let_in(
    shard: Shard, directory: Path, images: Sequence[Any], ids: list[int], num_turns: int
) -> LetIn:
    """Steps between the slices of a batch, layer by layer, all of them captured."""

    async def play() -> LetIn:
        there = _cut_driver(directory, shard)
        assert there.vision is not None
        batch = await batch_of(there.vision, directory, images, -1, shard)
        return await steps_let_in(shard, there.vision, there.language, batch, ids, num_turns)

    return asyncio.run(play())
