"""Videos through whole topologies: tokens and log-probabilities are those of transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd.engine.factory import build_executor, build_vision
from epd.tiny import CHECKPOINT
from tests.engine.vision.video_cases import Case, cases
from tests.roles.topologies.golden import Question, answer, ask_case, assert_exact
from tests.roles.topologies.test_exactness import (
    DAMAGES,
    EVERY,
    SMALL,
    SlowVision,
    ask_all,
    num_encoded,
    serving,
    total,
)

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    executor = build_executor(SMALL)
    return {"executor": executor, "vision": build_vision(CHECKPOINT, SMALL, executor)}


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """All cases; what transformers says is asked once."""
    return asyncio.run(_questions())


async def _questions() -> list[Question]:
    return [await ask_case(case, NEW_TOKENS) for case in cases()]


@pytest.mark.parametrize(
    "topology", [t if t == "1e1p1d" else pytest.param(t, marks=pytest.mark.long) for t in EVERY]
)
async def test_exact_in_every_topology(
    topology: str, shared: dict[str, Any], questions: list[Question]
) -> None:
    """Small chunks that end between the frames; then again: nothing is encoded twice, and the
    prompts are known."""
    hashes = {item.mm_hash for q in questions for item in q.generation.items}
    async with serving(shared, topology, max_chunk_tokens=48) as cluster:
        await ask_all(cluster.gateway, questions)
        assert num_encoded(cluster) == len(hashes)  # one video is in two of them
        await ask_all(cluster.gateway, questions)
        assert num_encoded(cluster) == len(hashes)
        assert total(cluster, "prefix_cache_hit_tokens") > 0


@pytest.mark.parametrize("damage", DAMAGES)
async def test_one_wrong_row_is_noticed(damage: str, shared: dict[str, Any]) -> None:
    """The comparison of this file can fail."""
    vision = SlowVision(shared["vision"], DAMAGES[damage])
    vision.may_give.release()
    question = await ask_case(Case().film(2, 16, 64, 48, fps=4.0).text("what happens?"), NEW_TOKENS)
    async with serving(shared, "1e1p1d", vision) as cluster:
        said = await answer(cluster.gateway, question)
    with pytest.raises(AssertionError):
        assert_exact(said, question)


async def test_a_video_that_breaks_off_is_told_to_its_client(shared: dict[str, Any]) -> None:
    """Its header can be read, its frames cannot; others are not harmed."""
    question = await ask_case(Case().film(1).text("what happens?"), NEW_TOKENS)
    (item,) = question.generation.items
    broken = bytearray(item.image)
    middle = broken.index(b"mdat") + 40
    broken[middle:] = bytes(len(broken) - middle)
    object.__setattr__(item, "image", bytes(broken))
    async with serving(shared, "1e1p1d") as cluster:
        (update,) = [u async for u in cluster.gateway.role.submit(question.generation)]
        assert update.error is not None and update.error.status == 400
        assert "video" in update.error.message
        await ask_all(cluster.gateway, [await ask_case(Case().film(6).text("and this?"))])
