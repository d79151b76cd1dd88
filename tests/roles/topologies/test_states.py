"""A family with states of fixed size: exact through every cut, however the work is repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd.config import ConfigError, EncodeConfig, EngineConfig, PrefillConfig, SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.roles.compose import Engines
from tests.engine.conftest import drawn_image
from tests.engine.tiny_models import make_model
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import ask, ask_all, question
from tests.roles.topologies.test_exactness import EVERY, total

BLOCK_NBYTES = 8192
NUM_STATE_BLOCKS = 2
SMALL = EngineConfig(kv_nbytes=96 * BLOCK_NBYTES, threads=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


def load(model_dir: Path) -> dict[str, Any]:
    executor = build_executor(SMALL)
    vision = build_vision(model_dir, SMALL, executor)
    return {"executor": executor, "vision": vision, "model_dir": model_dir}


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> dict[str, Any]:
    return load(model_dir)


@asynccontextmanager
async def serving(shared: dict[str, Any], topology: str, **settings: Any) -> AsyncIterator[Cluster]:
    cluster, config = Cluster(), msgspec.structs.replace(SMALL, **settings)
    for name, *roles in EVERY[topology]:
        engines = Engines(vision=shared["vision"] if "encode" in roles else None)
        if "prefill" in roles or "decode" in roles:
            engines.language = build_language(shared["model_dir"], config, shared["executor"])
            assert engines.language.kv_layout.num_state_blocks == NUM_STATE_BLOCKS
        early = PrefillConfig(min_early_tokens=1)
        encode = EncodeConfig(max_batch_patches=1)  # one image at a time
        cluster.add(name, tuple(roles), engines, engine=config, prefill=early, encode=encode)
    async with cluster.running():
        yield cluster
        await cluster.settle()


@pytest.mark.parametrize(
    ("topology", "chunk", "ahead"),
    [
        ("1e1p1d", 7, False),
        ("1e1pd", 1024, True),
        pytest.param("1epd", 7, True, marks=pytest.mark.long),
        pytest.param("1epd", 1024, False, marks=pytest.mark.long),
    ],
)
async def test_every_cut_says_what_transformers_says(
    topology: str, chunk: int, ahead: bool, shared: dict[str, Any]
) -> None:
    """Text, an image, two images, in chunks between decodes; then again, over used blocks."""
    model_dir = shared["model_dir"]
    asked = [
        await question("hello", max_tokens=12, model_dir=model_dir),
        await question("what?", 1, max_tokens=12, model_dir=model_dir),
        await question("both of them", 2, max_tokens=12, model_dir=model_dir),
    ]
    async with serving(shared, topology, max_chunk_tokens=chunk, async_scheduling=ahead) as cluster:
        for _ in range(2):
            await ask_all(cluster.gateway, asked)
        assert total(cluster, "preemptions") == 0
        assert total(cluster, "prefix_cache_hit_tokens") > 0
        assert total(cluster, "state_snapshots") > 0


def count_computed(cluster: Cluster) -> list[int]:
    """Tokens of each step of each sequence, from now on."""
    computed: list[int] = []
    for instance in cluster.instances.values():
        if instance.requests is not None:
            engine = instance.requests.engine

            def step(batch: Any, on_layers: Any = None, step: Any = engine.step) -> Any:
                computed.extend(len(sequence.token_ids) for sequence in batch)
                return step(batch, on_layers)

            engine.step = step  # type: ignore[method-assign]
    return computed


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("qwen3_5", "1epd"),
        pytest.param("qwen3_5", "1e1p1d", marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", "1epd", marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", "1e1p1d", marks=pytest.mark.long),
    ],
)
async def test_a_beginning_is_computed_once(
    family: str, topology: str, shared: dict[str, Any], tmp_path: Path
) -> None:
    """A second turn goes on where the prompt of the first ended.  Of texts that begin alike the
    second shows how far, and the third goes on there.  Another image of one size is no beginning
    of theirs."""
    if family != "qwen3_5":
        shared = load(make_model(family, tmp_path))
    images = [drawn_image(1, 64, 64), drawn_image(2, 48, 80)]
    first, others = (2, "what is this? " * 4), [drawn_image(3, 64, 64), images[1]]
    system = "a system prompt that many share, and which takes some blocks. "
    told: list[tuple[list[Any], list[Any], int]] = [
        ([first], images, 0),
        ([first, "two images", "and now?"], images, 96),
        ([first], others, 0),
        ([system + "who?"], [], 0),
        ([system + "and where was that?"], [], 0),
        ([system + "when?"], [], 64),
    ]
    async with serving(shared, topology) as cluster:
        computed = count_computed(cluster)
        for turns, pictures, num_found in told:
            one = await ask(turns, pictures, max_tokens=3, model_dir=shared["model_dir"])
            await ask_all(cluster.gateway, [one])
            num_prompt = len(one.generation.token_ids)
            assert sum(computed) == num_prompt - num_found + 2, "the last token needs no step"
            computed.clear()


@pytest.mark.parametrize(
    ("topology", "ahead"), [("1epd", True), pytest.param("1e1p1d", False, marks=pytest.mark.long)]
)
async def test_who_gives_way_begins_again(
    topology: str, ahead: bool, shared: dict[str, Any]
) -> None:
    """Blocks for one answer and a half: what the state held is computed again, from nothing."""
    texts = ["hello", "a longer question than that", "why?", "how?"]
    model_dir = shared["model_dir"]
    asked = [await question(text, max_tokens=40, model_dir=model_dir) for text in texts]
    needed = max(len(q.generation.token_ids) + len(q.token_ids) for q in asked)
    size = (needed * 2 // 16 + 2 * NUM_STATE_BLOCKS) * BLOCK_NBYTES
    async with serving(
        shared, topology, max_chunk_tokens=7, kv_nbytes=size, async_scheduling=ahead
    ) as cluster:
        await ask_all(cluster.gateway, asked)
        assert total(cluster, "preemptions") >= 1


class Drafts:
    """What follows in texts that are known, every third token spoilt."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts

    def draft(
        self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int, limit: int
    ) -> tuple[int, ...]:
        text = [*tokens(0, num_tokens)]
        (known,) = (t for t in self._texts if list(t[:num_tokens]) == text)
        drafts = known[num_tokens : num_tokens + limit]
        return tuple(t ^ ((num_tokens + at) % 3 == 0) for at, t in enumerate(drafts))


@pytest.mark.parametrize(
    ("topology", "has_few"),
    [("1e1p1d", False), ("1epd", True), pytest.param("1e1pd", False, marks=pytest.mark.long)],
)
async def test_drafts_change_no_token(
    topology: str, has_few: bool, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, over used blocks and snapshots; with few blocks requests give way while they draft."""
    model_dir = shared["model_dir"]
    asked = [
        await question("one two three one two three one two", max_tokens=40, model_dir=model_dir),
        await question("abababababab", max_tokens=40, model_dir=model_dir),
        await question("why?", max_tokens=40, model_dir=model_dir),
    ]
    texts = [[*one.generation.token_ids, *one.token_ids] for one in asked]
    monkeypatch.setattr("epd.roles.steps.speculation._lookup", lambda *_: Drafts(texts))
    settings = {
        "speculative": SpeculativeConfig("ngram", 4, 1, 3),
        "kv_nbytes": (max(map(len, texts)) * 2 // 16 + 4 if has_few else 96) * BLOCK_NBYTES,
        "max_chunk_tokens": 16,
        "async_scheduling": True,
    }
    async with serving(shared, topology, **settings) as cluster:
        for _ in range(2):
            await ask_all(cluster.gateway, asked)
        drafted = total(cluster, "spec_decode_num_draft_tokens")
        assert 0 < total(cluster, "spec_decode_num_accepted_tokens") < drafted
        assert bool(total(cluster, "preemptions")) is has_few


def test_what_would_compute_wrongly_is_refused_by_name(shared: dict[str, Any]) -> None:
    tiny = msgspec.structs.replace(SMALL, kv_nbytes=2 * BLOCK_NBYTES)
    with pytest.raises(ConfigError, match=r"3 KV blocks that a sequence has at least"):
        build_language(shared["model_dir"], tiny, shared["executor"])
