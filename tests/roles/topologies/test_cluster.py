"""Whole topologies in one process with the embedded model: right answers, balanced books."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd.api.prompts.prepare import Preparer
from epd.config import EngineConfig, GatewayConfig
from epd.frontend import Generation, Leave
from epd.messages import SamplingParams
from epd.roles.compose import Engines
from epd.tiny import CHECKPOINT, SAMPLES
from epd.tiny.samples import Entry, read_index
from tests.patience import PATIENCE_S
from tests.roles.topologies.cluster import Cluster

SMALL = EngineConfig(kv_nbytes=16 << 20, threads=1, max_chunk_tokens=64)
TOPOLOGIES = {
    "1e1p1d": [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")],
    "1e1pd": [("e0", "encode"), ("pd0", "prefill", "decode")],
    "1epd": [("epd0", "encode", "prefill", "decode")],
    "2e1p": [("e0", "encode"), ("e1", "encode"), ("p0", "prefill"), ("d0", "decode")],
}


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    return Preparer(GatewayConfig(model_dir=str(CHECKPOINT)))


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """Vision engines may be shared by instances; a language engine belongs to one."""
    from epd.engine.factory import build_executor, build_vision

    executor = build_executor(SMALL)
    return {"executor": executor, "vision": build_vision(CHECKPOINT, SMALL, executor)}


def engines_for(roles: tuple[str, ...], loaded: dict[str, Any]) -> Engines:
    from epd.engine.factory import build_language

    engines = Engines()
    if "encode" in roles:
        engines.vision = loaded["vision"]
    if "prefill" in roles or "decode" in roles:
        engines.language = build_language(CHECKPOINT, SMALL, loaded["executor"])
    return engines


def cluster_of(topology: str, loaded: dict[str, Any]) -> Cluster:
    cluster = Cluster()
    for name, *roles in TOPOLOGIES[topology]:
        cluster.add(name, tuple(roles), engines_for(tuple(roles), loaded), engine=SMALL)
    return cluster


async def prepared(preparer: Preparer, entry: Entry, max_tokens: int = 64) -> Generation:
    content: list[dict[str, Any]] = []
    for name in entry.images:
        data = base64.b64encode((Path(SAMPLES) / name).read_bytes()).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}})
    content.append({"type": "text", "text": entry.question})
    prompt = await preparer.chat([{"role": "user", "content": content}])
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=preparer.eos_token_ids)
    return Generation(prompt.token_ids, prompt.items, sampling)


async def answer(cluster: Cluster, preparer: Preparer, generation: Generation) -> str:
    detokenizer = preparer.detokenizer()
    text = ""
    async for update in cluster.gateway.role.submit(generation):
        assert update.error is None
        text += detokenizer.push(update.token_ids)
    return text + detokenizer.finish()


@pytest.mark.parametrize(
    "topology",
    [t if t in ("1e1p1d", "1epd") else pytest.param(t, marks=pytest.mark.long) for t in TOPOLOGIES],
)
async def test_sample_images_are_read(
    topology: str, preparer: Preparer, loaded: dict[str, Any]
) -> None:
    cluster = cluster_of(topology, loaded)
    async with cluster.running():
        entries = read_index()
        generations = [await prepared(preparer, entry) for entry in entries]
        texts = await asyncio.gather(*(answer(cluster, preparer, g) for g in generations))
        assert texts == [entry.answer for entry in entries]
        await cluster.settle()
        for instance in cluster.instances.values():
            assert not instance.actor.counters, (instance.actor.address, instance.actor.counters)
        assert not cluster.gateway.actor.counters


@pytest.mark.parametrize(("groups", "num_told"), [(1, 0), (2, 1), (9, 3)])
async def test_kv_moves_in_as_many_parts_as_the_setting_says(
    groups: int, num_told: int, preparer: Preparer, loaded: dict[str, Any]
) -> None:
    """The model has four layers; behind the last one there is nothing to tell ahead of time."""
    from epd.engine.factory import build_language

    config = msgspec.structs.replace(SMALL, kv_layer_groups=groups)
    cluster = Cluster()
    cluster.add("e0", ("encode",), Engines(vision=loaded["vision"]), engine=config)
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        language = build_language(CHECKPOINT, config, loaded["executor"])
        cluster.add(name, (role,), Engines(language=language), engine=config)
    prompt = await preparer.chat([{"role": "user", "content": "What is in short chunks? " * 8}])
    asked = Generation(prompt.token_ids, (), SamplingParams(max_tokens=3))
    async with cluster.running():
        await answer(cluster, preparer, asked)
        await cluster.settle()
        transitions = cluster.instances["p0"].actor.journal.transitions
        told = sum(count for t, count in transitions.items() if t.event == "LayersComputed")
    assert told == num_told


async def test_an_image_seen_twice_is_encoded_once(
    preparer: Preparer, loaded: dict[str, Any]
) -> None:
    """F37: the second request joins the first one's load, a third finds resident rows."""
    cluster = cluster_of("1e1p1d", loaded)
    entry = read_index()[0]
    async with cluster.running():
        both = [await prepared(preparer, entry) for _ in range(2)]
        await asyncio.gather(*(answer(cluster, preparer, g) for g in both))
        assert await answer(cluster, preparer, both[0]) == entry.answer
        await cluster.settle()
        journal = cluster.instances["e0"].actor.journal
        starts = [
            t for t in journal.transitions if t.machine == "ENCODING" and t.target == "ENCODING"
        ]
        assert sum(journal.transitions[t] for t in starts) == 1


async def test_a_client_that_leaves_frees_everything(
    preparer: Preparer, loaded: dict[str, Any]
) -> None:
    """F43: cancel before the first token, and in mid-stream; memory returns at every stage."""
    cluster = cluster_of("1e1p1d", loaded)
    entry = read_index()[0]
    async with cluster.running() as gateway:
        early = gateway.role.submit(await prepared(preparer, entry))
        early.cancel(Leave.GONE, "client disconnected")
        generation = await prepared(preparer, entry, max_tokens=400)
        endless = Generation(generation.token_ids, generation.items, SamplingParams(max_tokens=400))
        stream = gateway.role.submit(endless)
        async for _ in stream:
            stream.cancel(Leave.GONE, "client disconnected")
        await cluster.settle()
        assert gateway.role.outcomes == {"cancelled": 2}


async def test_a_stuck_prefill_does_not_stop_text(
    preparer: Preparer, loaded: dict[str, Any]
) -> None:
    """Text-only requests pass one that waits for images which never come."""
    cluster = cluster_of("1e1p1d", loaded)
    async with cluster.running() as gateway:
        encode = cluster.instances["e0"]
        encode.actor.closing = True  # deaf: takes no message, sends none
        waiting = gateway.role.submit(await prepared(preparer, read_index()[0]))
        text = await preparer.chat([{"role": "user", "content": "Hello"}])
        sampling = SamplingParams(max_tokens=8, stop_token_ids=preparer.eos_token_ids)
        said = await answer(cluster, preparer, Generation(text.token_ids, (), sampling))
        assert said
        assert waiting.next_ready() is None
        waiting.cancel(Leave.ENOUGH, "enough")


async def test_a_gateway_that_is_gone_leaves_no_requests_behind(
    preparer: Preparer, loaded: dict[str, Any]
) -> None:
    """Its instances give the memory back when a new gateway takes its place."""
    cluster = cluster_of("1e1p1d", loaded)
    async with cluster.running() as gateway:
        text = await preparer.chat([{"role": "user", "content": "Hello"}])
        stream = gateway.role.submit(Generation(text.token_ids, (), SamplingParams(max_tokens=400)))
        async for _ in stream:
            break
        old = gateway.actor.address
        for instance in cluster.instances.values():
            for role in instance.actor.components:
                role.peer_lost(old)
        async with asyncio.timeout(PATIENCE_S):
            while any(any(i.live().values()) for i in cluster.instances.values()):
                await asyncio.sleep(0.01)


async def test_the_gateway_knows_who_holds_an_image_and_how_it_moved(
    preparer: Preparer, loaded: dict[str, Any]
) -> None:
    cluster = cluster_of("2e1p", loaded)
    entry = read_index()[0]
    async with cluster.running() as gateway:
        generation = await prepared(preparer, entry)
        mm_hash = generation.items[0].mm_hash
        stream = gateway.role.submit(generation)
        async for update in stream:
            assert update.error is None
        params = stream.transfer_params()
        holder = params.ec[mm_hash]["remote_engine_id"]
        assert params.ec[mm_hash]["transport"] == params.kv["transport"] == "local"
        assert (params.kv["remote_engine_id"], params.kv["decode_engine_id"]) == ("p0", "d0")
        assert (
            params.kv["do_remote_prefill"] and params.kv["remote_request_id"] == stream.request_id
        )
        async with asyncio.timeout(PATIENCE_S):
            while not gateway.directory.index.resident(mm_hash):
                await asyncio.sleep(0.01)
        assert gateway.directory.index.resident(mm_hash) == (holder,)
        shown = {i["instance"]: i["cached_images"] for i in gateway.role.ready().instances}
        assert shown == {"d0": 0, "e0": 0, "e1": 0, "p0": 0} | {holder: 1}
        await cluster.settle()
        assert not gateway.actor.counters
