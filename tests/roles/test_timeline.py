"""The timeline of a request over real engines: every stage, each picture, each chunk."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from epd.api.port import TimelineEntry
from epd.api.prepare import Preparer
from epd.tiny.samples import read_index
from tests.roles.test_cluster import cluster_of, loaded, prepared, preparer

__all__ = ["loaded", "preparer"]  # fixtures
TWO_PICTURES = next(entry for entry in read_index() if len(entry.images) == 2)


def states(timeline: list[TimelineEntry], machine: str, instance: str = "") -> set[str]:
    return {
        entry.state
        for entry in timeline
        if entry.machine == machine and instance in ("", entry.instance)
    }


async def play(
    loaded: dict[str, Any], preparer: Preparer, stop_after: int = 0
) -> tuple[int, list[TimelineEntry]]:
    """Prompt length and timeline; `stop_after` tokens the client has enough."""
    cluster = cluster_of("1e1p1d", loaded)
    generation = await prepared(preparer, TWO_PICTURES)
    if stop_after:
        sampling = msgspec.structs.replace(generation.sampling, max_tokens=200, stop_token_ids=())
        generation = type(generation)(generation.token_ids, generation.items, sampling)
    generation = type(generation)(
        generation.token_ids, generation.items, generation.sampling, wants_timeline=True
    )
    async with cluster.running():
        stream = cluster.gateway.role.submit(generation)
        concluded = asyncio.Event()
        stream.on_concluded = concluded.set
        num_tokens = 0
        async for update in stream:
            num_tokens += len(update.token_ids)
            if stop_after and num_tokens >= stop_after:
                assert states(stream.timeline(), "REQUEST", "p0")  # at once: what has come so far
                stream.cancel("stop string")
        async with asyncio.timeout(10):
            await concluded.wait()
        await cluster.settle()
        return len(generation.token_ids), stream.timeline()


async def test_every_stage_picture_and_chunk_is_told(
    loaded: dict[str, Any], preparer: Preparer
) -> None:
    num_prompt, timeline = await play(loaded, preparer)
    assert states(timeline, "ENCODING", "e0") >= {"QUEUED", "PREPARED", "ENCODING", "RESIDENT"}
    assert len({entry.key for entry in timeline if entry.machine == "ENCODING"}) == 2
    assert states(timeline, "REQUEST", "p0") >= {"RUNNING", "TRANSFERRING", "FINISHED"}
    assert states(timeline, "REQUEST", "d0") == {"WAITING_FOR_REMOTE_KV", "DECODING", "FINISHED"}
    rooms = {entry.key for entry in timeline if entry.machine == "TRANSFER"}
    assert rooms == {"1/0", "1/1", "1/kv"}
    chunks = [entry for entry in timeline if entry.machine == "CHUNK"]
    assert sum(chunk.num_tokens for chunk in chunks) == num_prompt
    assert max(chunk.num_tokens for chunk in chunks) <= 64
    assert len(chunks) >= num_prompt // 64
    running = [e.at_s for e in timeline if (e.machine, e.state) == ("REQUEST", "RUNNING")]
    for chunk in chunks:
        assert chunk.lasted_s > 0
        assert chunk.at_s >= running[0] - 0.001
    assert [entry.at_s for entry in timeline] == sorted(entry.at_s for entry in timeline)


async def test_a_client_that_has_enough_gets_the_whole_timeline(
    loaded: dict[str, Any], preparer: Preparer
) -> None:
    _, timeline = await play(loaded, preparer, stop_after=5)
    assert "DECODING" in states(timeline, "REQUEST", "d0")
    assert states(timeline, "GENERATION") >= {"STREAMING", "CANCELLING", "FINISHED"}
    assert Counter(entry.machine for entry in timeline)["CHUNK"] > 0
