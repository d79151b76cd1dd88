"""Greedy output of real processes equals `transformers.generate`, token for token, in fp32.

Also covers, between real processes: fault F26 (image requests are decoded at their true positions
over many tokens), F12 (deepstack travels with the main rows: log-probabilities are compared), and
F10 (an image received once serves every chunk of its prompt).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from epd.transport.backends import BACKENDS
from tests.e2e.client import post_all
from tests.e2e.goldens import FAMILIES, Golden, differences, directory_of, goldens, heavy_goldens
from tests.e2e.server import Server, serving
from tests.engine.tiny_models import OF_GEMMA, OF_GLM, SECOND_SIZES

pytestmark = pytest.mark.timeout(400)
LONG = pytest.mark.long

HEAVY_IMAGES = 16
SEVERAL = ("internvl", "mistral3", "paddleocr_vl", "deepseek_ocr2", "gemma4")

# Each way to cut the pipeline, each transport and each family at least once; but for Kimi, which
# tests/roles/topologies/test_together.py cuts in every way within one process.
OFTEN = [
    ("1e1p1d", "qwen3_vl", "auto"),
    ("1epd", "qwen2_vl", "auto"),
    ("1e1pd", "qwen2_5_vl", "tcp"),
    ("1e1p1d", "llava_onevision", "file"),
    ("1e1p1d", "qwen3_vl_moe", "mooncake"),
]
ARRANGEMENTS = [
    *(
        (topology, family, "auto")
        for topology in ("1e1p1d", "1e1pd", "1epd")
        for family in FAMILIES
    ),
    *((topology, "embedded", "auto") for topology in ("2e1p2d", "all")),
    *(("1e1p1d", family, "auto") for family in SECOND_SIZES),
    *(
        ("1e1pd:tp2", family, "auto")
        for family in dict.fromkeys((*SEVERAL, *OF_GLM, *SECOND_SIZES))
    ),
    *(("1e1p:tp2,1d:tp2", family, "auto") for family in OF_GEMMA),
    *((topology, "gemma4", "auto") for topology in ("1e1p:tp2,1d", "1e1p1d:tp2")),
    *(("1e1p1d", "embedded", transport) for transport in ("tcp", "file", "mooncake", "nixl")),
]


async def burst(server: Server, family: str, asked: Sequence[Golden], seed: int = 0) -> list[str]:
    """All at once, in a mixed order; how the replies differ."""
    asked = random.Random(seed).sample(asked, len(asked))
    replies = await post_all(server.base_url, [golden.body for golden in asked])
    return [
        difference
        for golden, reply in zip(asked, replies, strict=True)
        for difference in differences(family, golden, reply)
    ]


@pytest.mark.parametrize(
    ("topology", "family", "transport", "times"),
    [
        *(pytest.param(*case, 1, id="-".join(case)) for case in OFTEN),
        *(pytest.param(*case, 2, id=f"more-{'-'.join(case)}", marks=LONG) for case in ARRANGEMENTS),
    ],
)
async def test_equals_generate(
    topology: str, family: str, transport: str, times: int, tmp_path: Path
) -> None:
    """All conversations in one burst, videos too, then again from warm caches."""
    if transport in BACKENDS and (reason := BACKENDS[transport].lacks()):
        pytest.skip(reason)
    settings = {"transport": transport, "transport_directory": str(tmp_path)}
    with serving(topology, model=directory_of(family), **settings) as server:
        assert await burst(server, family, goldens(family)) == []
        warm = [*goldens(family)] * times
        assert await burst(server, family, warm[:: 3 - times], seed=1) == []


@pytest.mark.long
async def test_chunked_prefill() -> None:
    """Fault F10: images longer than a chunk are received once and read by every chunk."""
    settings = {"engine__max_chunk_tokens": 16, "engine__max_step_tokens": 48}
    with serving("1e1p1d", model=directory_of("qwen3_vl"), **settings) as server:
        assert await burst(server, "qwen3_vl", goldens("qwen3_vl") * 2) == []


@pytest.mark.long
async def test_small_pools_and_a_loaded_encoder() -> None:
    """Faults F2, F3, F4, F18: few slots and much to encode delay and change nothing, neither what
    is asked beside it nor the answers about what is encoded."""
    settings = {"prefill__pool_nbytes": "1MiB", "encode__cache_device_nbytes": "256KiB"}
    settings |= {"encode__cache_host_nbytes": "1MiB", "encode__send_buffer_nbytes": "768KiB"}
    heavy = heavy_goldens("embedded", HEAVY_IMAGES)
    with serving("2e1p2d", model=directory_of("embedded"), **settings) as server:
        heavy_ones, others = await asyncio.gather(
            burst(server, "embedded", heavy), burst(server, "embedded", goldens("embedded") * 3)
        )
    assert heavy_ones == []
    assert others == []
