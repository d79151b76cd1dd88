"""Greedy output of real processes equals `transformers.generate`, token for token, in fp32.

Also covers, between real processes: fault F26 (image requests are decoded at their true positions
over many tokens), F12 (deepstack travels with the main rows: log-probabilities are compared), and
F10 (a picture received once serves every chunk of its prompt).
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from epd.transport.mooncake_library import missing
from tests.e2e.client import Reply, png, post_all, question
from tests.e2e.goldens import FAMILIES, Golden, differences, directory_of, goldens
from tests.e2e.server import Server, serving
from tests.engine.conftest import picture

pytestmark = pytest.mark.timeout(400)

HEAVY_PICTURES = 24

OFTEN = [("1e1p1d", "embedded"), ("1e1p1d", "qwen3_vl"), ("1epd", "embedded")]
ARRANGEMENTS = [
    *(("1e1p1d", family) for family in FAMILIES),
    *((topology, "embedded") for topology in ("1e1pd", "1epd", "2e1p2d", "all")),
]


async def burst(server: Server, family: str, times: int = 1, every: int = 1) -> list[str]:
    """All conversations at once, or one of `every` so many, `times` over, in a mixed order; how the
    replies differ."""
    asked: list[Golden] = [*goldens(family)[::every]] * times
    random.Random(times).shuffle(asked)
    replies: list[Reply] = await post_all(server.base_url, [golden.body for golden in asked])
    return [
        difference
        for golden, reply in zip(asked, replies, strict=True)
        for difference in differences(family, golden, reply)
    ]


@pytest.mark.parametrize(("topology", "family"), OFTEN)
async def test_equals_generate(topology: str, family: str) -> None:
    """Conversations in one burst, videos too, then again from warm caches."""
    with serving(topology, model=directory_of(family)) as server:
        assert await burst(server, family, every=2) == []
        assert await burst(server, family, every=3) == []


@pytest.mark.long
@pytest.mark.parametrize(("topology", "family"), ARRANGEMENTS)
async def test_all_of_every_family_equal_generate(topology: str, family: str) -> None:
    """All conversations in one burst, then twice over from warm caches."""
    with serving(topology, model=directory_of(family)) as server:
        assert await burst(server, family) == []
        assert await burst(server, family, times=2) == []


@pytest.mark.long
async def test_chunked_prefill() -> None:
    """Fault F10: pictures longer than a chunk are received once and read by every chunk."""
    settings = {"engine__max_chunk_tokens": 16, "engine__max_step_tokens": 48}
    with serving("1e1p1d", model=directory_of("qwen3_vl"), **settings) as server:
        assert await burst(server, "qwen3_vl", times=2) == []


async def test_small_pools_and_a_loaded_encoder() -> None:
    """Faults F2, F3, F4, F18: few slots and much to encode delay and change nothing."""
    settings = {"prefill__pool_nbytes": "1MiB", "encode__cache_device_nbytes": "256KiB"}
    settings |= {"encode__cache_host_nbytes": "1MiB", "encode__send_buffer_nbytes": "256KiB"}
    heavy = [
        question("read", png(picture(500 + i, 900, 700)), max_tokens=4)
        for i in range(HEAVY_PICTURES)
    ]
    with serving("2e1p2d", model=directory_of("embedded"), **settings) as server:
        loading = asyncio.create_task(post_all(server.base_url, heavy))
        assert await burst(server, "embedded", times=4) == []
        assert {reply.status for reply in await loading} == {200}


@pytest.mark.parametrize("transport", ["tcp", "file", "mooncake"])
async def test_over_every_transport(transport: str, tmp_path: Path) -> None:
    """Rows and KV that another transport than shared memory brings are what the engines read."""
    if transport == "mooncake" and (reason := missing()):
        pytest.skip(reason)
    settings = {"transport": transport, "transport_directory": str(tmp_path)}
    with serving("1e1p1d", model=directory_of("embedded"), **settings) as server:
        assert await burst(server, "embedded", every=4) == []
