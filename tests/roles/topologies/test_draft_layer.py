"""Whole topologies that draft by a checkpoint's layer or a head's: tokens are transformers'."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.base import StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.roles.compose import Engines
from epd.tiny import CHECKPOINT
from tests.engine.draft_models import make_drafting
from tests.engine.eagle_heads import make_head
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import Question, ask_all, question
from tests.roles.topologies.test_exactness import EVERY, total
from tests.roles.topologies.test_migrated import answers

CONFIG = EngineConfig(threads=1, max_chunk_tokens=16)


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_k25", "eagle3"])
def shared(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, which drafts by itself or by a head that has answers to it by heart."""
    directory, is_head = tmp_path_factory.mktemp("drafting"), request.param == "eagle3"
    model_dir = CHECKPOINT if is_head else make_drafting(request.param, directory, agreeing=True)
    asked = asyncio.run(_questions(model_dir))
    texts = [[*one.generation.token_ids, *one.token_ids] for one in asked]
    head = str(make_head(directory, model_dir, texts)) if is_head else ""
    executor = build_executor(CONFIG)
    vision = build_vision(model_dir, CONFIG, executor)
    made = {"executor": executor, "vision": vision, "model_dir": model_dir, "asked": asked}
    latent, head_layers = 4 * 16 * 24 * 4, 5 * 2 * 16 * 2 * 64 * 4
    nbytes = {"qwen3_5": 3 * 4096, "kimi_k25": latent, "eagle3": head_layers}[request.param]
    drafting = SpeculativeConfig("eagle3" if is_head else "mtp", 3, model=head)
    return made | {"drafting": drafting, "nbytes": nbytes}  # of a block


async def _questions(model_dir: Path) -> list[Question]:
    asks = ("one two three", 0, 30), ("what?", 1, 20), ("hello", 0, 1), ("why?", 0, 3)
    return [await question(text, n, most, model_dir=model_dir) for text, n, most in asks]


@pytest.fixture(scope="module")
def asked(shared: dict[str, Any]) -> list[Question]:
    return shared["asked"]  # type: ignore[no-any-return]


def config_of(shared: dict[str, Any], num_drafts: int = 3, num_blocks: int = 96) -> EngineConfig:
    drafting = msgspec.structs.replace(shared["drafting"], num_speculative_tokens=num_drafts)
    nbytes = num_blocks * shared["nbytes"]
    return msgspec.structs.replace(CONFIG, speculative=drafting, kv_nbytes=nbytes)


def cluster_of(
    shared: dict[str, Any], topology: str, num_drafts: int = 3, num_blocks: int = 96, **more: Any
) -> Cluster:
    cluster = Cluster()
    for name, *roles in EVERY[topology]:
        count = num_drafts if "decode" in roles else 3
        config = msgspec.structs.replace(config_of(shared, count, num_blocks), **more)
        engines = Engines(vision=shared["vision"] if "encode" in roles else None)
        if "prefill" in roles or "decode" in roles:
            engines.language = build_language(shared["model_dir"], config, shared["executor"])
            assert engines.language.kv_layout.block_nbytes == shared["nbytes"]
        cluster.add(name, tuple(roles), engines, engine=config)
    return cluster


@pytest.mark.parametrize(
    ("topology", "ahead", "has_few"),
    [
        ("1e1p1d", False, False),
        ("1epd", True, True),
        pytest.param("1e1pd", True, False, marks=pytest.mark.long),
    ],
)
async def test_drafts_change_no_token(
    topology: str, ahead: bool, has_few: bool, shared: dict[str, Any], asked: list[Question]
) -> None:
    """Twice, over used blocks and cached beginnings; with few blocks requests give way."""
    most = max(len(one.generation.token_ids) + len(one.token_ids) for one in asked)
    num_blocks = most // 16 + 8 if has_few else 96
    cluster = cluster_of(shared, topology, num_blocks=num_blocks, async_scheduling=ahead)
    async with cluster.running():
        for _ in range(2):
            await ask_all(cluster.gateway, asked)
        await cluster.settle()
    drafted = total(cluster, "spec_decode_num_draft_tokens")
    accepted = total(cluster, "spec_decode_num_accepted_tokens")
    assert 0.3 * drafted < accepted < drafted, (accepted, drafted)


async def test_the_layer_is_left_out_while_nobody_drafts(
    shared: dict[str, Any], asked: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What began meanwhile has no drafts to its end, when others have some again."""
    now = {"drafts": True}
    worth: Any = SimpleNamespace(
        pays=lambda num_decoding, num_followed: now["drafts"],
        observe=lambda *turn: None if next(turns) % 8 else now.update(drafts=not now["drafts"]),
        is_kept=False,
    )
    turns = itertools.count(1)
    monkeypatch.setattr("epd.roles.steps.speculation._worth", lambda: worth)
    cluster = cluster_of(shared, "1epd")
    requests = cluster.instances["epd0"].requests
    assert requests is not None
    step, seen, lost = requests.engine.step, Counter[bool](), set[str]()

    def watch(batch: Sequence[StepSequence], on_layers: Any = None) -> Any:
        for sequence in batch:
            seen[sequence.is_followed] += 1
            assert sequence.is_followed or not (sequence.num_drafts or sequence.num_wanted)
            assert sequence.is_followed <= (sequence.request_id not in lost)
        lost.update(s.request_id for s in batch if not s.is_followed)
        return step(batch, on_layers)

    requests.engine.step = watch  # type: ignore[method-assign]
    async with cluster.running():
        for _ in range(2):
            await ask_all(cluster.gateway, asked)
        await cluster.settle()
    assert seen[True] and seen[False]


async def test_a_decode_that_drafts_nothing_takes_what_a_prefill_with_drafts_sends(
    shared: dict[str, Any], asked: list[Question]
) -> None:
    """It has the layer, so its KV has the layout of all, and no drafts are made."""
    cluster = cluster_of(shared, "1e1p1d", num_drafts=0)
    async with cluster.running():
        await ask_all(cluster.gateway, asked)
        await cluster.settle()
    assert total(cluster, "spec_decode_num_draft_tokens") == 0


async def test_an_answer_goes_on_where_drafts_are_made_and_where_not(
    shared: dict[str, Any], asked: list[Question]
) -> None:
    """Where it is decoded is lost to it in its middle; the other one makes drafts, or none."""
    long = [one for one in asked if len(one.token_ids) > 10]
    cluster = Cluster()
    for name, count in (("epd0", 3), ("epd1", 0)):
        config = config_of(shared, count)
        language = build_language(shared["model_dir"], config, shared["executor"])
        engines = Engines(vision=shared["vision"], language=language)
        cluster.add(name, ("encode", "prefill", "decode"), engines, engine=config)
    generations = [one.generation for one in long] * 2
    async with cluster.running() as gateway:
        said = await answers(gateway, generations, moves=True)
        await cluster.settle()
    assert [tokens for tokens, _ in said] == [list(one.token_ids) for one in long] * 2
    assert total(cluster, "spec_decode_num_accepted_tokens") > 0
