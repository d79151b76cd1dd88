"""The timeline of a request over real engines: every stage, each image, each chunk."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from typing import Any

import msgspec

from epd.api.prompts.prepare import Preparer
from epd.api.server import ApiServer
from epd.config import GatewayConfig
from epd.frontend import Leave, TimelineEntry
from epd.tiny import CHECKPOINT, SAMPLES
from epd.tiny.samples import read_index
from tests.api.test_server import openai_client
from tests.api.watching.collector import collecting, values
from tests.patience import PATIENCE_S
from tests.roles.topologies.test_cluster import cluster_of, loaded, prepared, preparer

__all__ = ["loaded", "preparer"]  # fixtures
TWO_IMAGES = next(entry for entry in read_index() if len(entry.images) == 2)


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
    generation = await prepared(preparer, TWO_IMAGES)
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
                stream.cancel(Leave.ENOUGH, "stop string")
        async with asyncio.timeout(PATIENCE_S):
            await concluded.wait()
        await cluster.settle()
        return len(generation.token_ids), stream.timeline()


async def test_every_stage_image_and_chunk_is_told(
    loaded: dict[str, Any], preparer: Preparer
) -> None:
    num_prompt, timeline = await play(loaded, preparer)
    assert states(timeline, "ENCODING", "e0") >= {"QUEUED", "PREPARED", "ENCODING", "RESIDENT"}
    assert len({entry.key for entry in timeline if entry.machine == "ENCODING"}) == 2
    assert states(timeline, "REQUEST", "p0") >= {"RUNNING", "TRANSFERRING", "FINISHED"}
    assert states(timeline, "REQUEST", "d0") == {"WAITING_FOR_REMOTE_KV", "DECODING", "FINISHED"}
    rooms = {entry.key for entry in timeline if entry.machine == "OUTGOING"}
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
    assert states(timeline, "GENERATION") >= {"STREAMING", "STOPPING", "FINISHED"}
    assert Counter(entry.machine for entry in timeline)["CHUNK"] > 0


async def test_a_collector_sees_every_stage(loaded: dict[str, Any]) -> None:
    """Over HTTP, real engines, and a collector that parses what is sent; ended by a stop string."""
    images = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}
        for data in map(base64_of, TWO_IMAGES.images)
    ]
    content = [*images, {"type": "text", "text": TWO_IMAGES.question}]
    cluster = cluster_of("1e1p1d", loaded)
    async with collecting() as collector, cluster.running() as gateway:
        config = GatewayConfig(
            model_dir=str(CHECKPOINT), port=0, otlp_traces_endpoint=collector.url
        )
        server = ApiServer(gateway.role, config)
        await server.start()
        try:
            async with openai_client(server) as client:
                await client.chat.completions.create(
                    model="checkpoint",
                    messages=[{"role": "user", "content": content}],
                    temperature=0,
                    stop=[TWO_IMAGES.answer[2:4]],
                )
            await cluster.settle()
        finally:
            await server.close()
    counts = Counter(span.name for span in collector.spans)
    assert counts.pop("prefill chunk") >= 3
    assert {"fetch": 2, "decode-image": 2, "encode": 2, "transfer": 3}.items() <= counts.items()
    assert {"prepare", "queue", "wait", "prefill", "kv", "decode", "cancel"} <= counts.keys()
    root = collector.root
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    names = {span.span_id: span.name for span in collector.spans}
    parents = {span.name: names.get(span.parent_span_id, "") for span in collector.spans}
    assert parents["prefill chunk"] == "prefill"
    assert parents["fetch"] == "prepare"
    assert parents["decode"] == root.name
    instances = {
        span.name: values(span.attributes)["epd.instance"]
        for span in collector.spans
        if "epd.instance" in values(span.attributes)
    }
    assert (instances["encode"], instances["prefill"], instances["decode"]) == ("e0", "p0", "d0")
    assert values(root.attributes)["gen_ai.latency.time_in_model_prefill"] > 0


def base64_of(name: str) -> str:
    return base64.b64encode((SAMPLES / name).read_bytes()).decode()
