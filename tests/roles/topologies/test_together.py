"""Exactness of everything together: tokens *and logits* are those of transformers.

Each case is a cluster of production roles over real engines that answers several questions at once:
text, one image, two images, a video.  The logits of every generated position are read where the
engine of that position makes them, so what is compared has gone through encoder, rows, chunks, KV
transfer, recomputation, steps ahead and drafts.  Cases cover every pair of the dimensions below;
with `EPD_EXACTNESS=whole` they are the whole product, chunks of one token too (an hour).
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from epd.config import EncodeConfig, EngineConfig, PrefillConfig, SpeculativeConfig
from epd.engine.base import Rows, StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.messages import KvLayout
from epd.roles.compose import Engines
from tests.engine.tiny_models import (
    EMBEDDED,
    SECOND_SIZES,
    VISION_FAMILIES,
    WITH_STATES,
    WITHOUT_VIDEOS,
    cached_model,
)
from tests.engine.vision.video_cases import Case, cases
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import Question, ask_case, question
from tests.roles.topologies.pairwise import everything, pairs_of, pairwise

CONFIG = EngineConfig(threads=1)
TOLERANCE = 1e-4
WRONG = r"differ by|assert \["  # logits, or tokens
DIMENSIONS: dict[str, Sequence[Any]] = {
    "family": ("embedded", "qwen2_5_vl", "kimi_k25"),
    "chunk": (7, 64, 1024),
    "topology": ("1epd", "1e1pd", "1e1p1d"),
    "caching": (False, True),
    "tight": (False, True),  # blocks for one answer and a half: the younger ones give way
    "ahead": (False, True),
    "drafting": (False, True),  # speculative decoding by prompt lookup
}
FAMILIES = [
    *(f for f in VISION_FAMILIES if f not in WITH_STATES),  # those: test_states.py
    *SECOND_SIZES,
]
WHOLE = {**DIMENSIONS, "chunk": (1, 7, 16, 64, 1024), "family": ("embedded", *FAMILIES)}
MORE = {**WHOLE, "chunk": (7, 16, 64, 1024)}  # chunks of one token: test_exactness
IS_WHOLE = os.environ.get("EPD_EXACTNESS") == "whole"
INSTANCES = {
    "1epd": [("epd0", "encode", "prefill", "decode")],
    "1e1pd": [("e0", "encode"), ("pd0", "prefill", "decode")],
    "1e1p1d": [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")],
}
NGRAM = SpeculativeConfig("ngram", 3, 1, 3)
# Request and output index to logits, and the drafts that stood before them.
Seen = dict[tuple[str, int], list[tuple[torch.Tensor, tuple[int, ...]]]]
Damage = Callable[[Any], Any]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(
        (key if value else f"no {key}") if isinstance(value, bool) else str(value)
        for key, value in case.items()
    )


TILES = dict.fromkeys(DIMENSIONS, False) | {  # whose rows lie in several places of a prompt
    "family": "idefics3", "chunk": 7, "topology": "1e1p1d", "caching": True,
}  # fmt: skip
CASES = [
    *(pytest.param(case, id=name_of(case)) for case in (*pairwise(DIMENSIONS), TILES)),
    *(
        pytest.param(case, id=f"more-{name_of(case)}", marks=pytest.mark.long)
        for case in (everything(WHOLE) if IS_WHOLE else pairwise(MORE))
    ),
]


def model_dir(family: str) -> Path:
    return EMBEDDED if family == "embedded" else cached_model(family)


@cache
def executor() -> Any:
    return build_executor(CONFIG)


@cache
def vision(model_dir: Path) -> Any:
    return build_vision(model_dir, CONFIG, executor())


@cache
def kv_layout(model_dir: Path) -> KvLayout:
    return build_language(model_dir, CONFIG, executor()).kv_layout


@cache
def golden(model_dir: Path, text: str, images: int, max_tokens: int) -> Question:
    return asyncio.run(question(text, images, max_tokens, model_dir=model_dir))


@cache
def golden_video(model_dir: Path) -> Question:
    return asyncio.run(ask_case(Case().film(1).text("what happens?"), 6, model_dir))


def questions(model_dir: Path, *, tight: bool) -> list[Question]:
    """Text, one image, two, a video; where blocks are to run out, of like lengths."""
    if not tight:
        asked = (("hello there", 0, 6), ("what is it?", 1, 6), ("compare them", 2, 6))
        takes_videos = model_dir not in map(cached_model, WITHOUT_VIDEOS)
        videos = [golden_video(model_dir)] if takes_videos else []
        return [golden(model_dir, *one) for one in asked] + videos
    texts = ("hello", "why is that?", "where?")  # two blocks each, and soon a third
    found = [golden(model_dir, text, 0, 24) for text in texts]
    seen = golden(model_dir, "what is it?", 1, 6)
    return found + [seen] * (num_tokens(seen) <= max(map(num_tokens, found)))


def num_tokens(asked: Question) -> int:
    return len(asked.generation.token_ids) + len(asked.token_ids)


class Watched:
    """A forward, and the logits of every position that is sampled."""

    def __init__(self, forward: Any, seen: Seen) -> None:
        self.__dict__.update(forward=forward, seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.forward, name, value)

    def __call__(self, batch: Sequence[StepSequence], sources: Sequence[int]) -> Any:
        logits, scores = self.forward(batch, sources)
        rows = iter(logits)
        for sequence in batch:
            if sequence.sample is None:
                continue
            request, drafts = sequence.request_id.rpartition("/")[0], tuple(sequence.drafts)
            for at in range(1 + sequence.num_drafts):
                position = self.seen[request, sequence.output_index + at]
                position.append((next(rows).clone(), drafts[:at]))
        assert next(rows, None) is None
        return logits, scores


class Served:
    """A cluster, and what its engines computed."""

    def __init__(
        self,
        model_dir: Path,
        topology: str,
        config: EngineConfig,
        tower: Any = None,
        send_kv: Callable[[TorchLanguageEngine], None] = lambda engine: None,
    ) -> None:
        self.cluster = Cluster()
        self.seen: Seen = defaultdict(list)
        for name, *roles in INSTANCES[topology]:
            engines = Engines(vision=(tower or vision(model_dir)) if "encode" in roles else None)
            if "prefill" in roles or "decode" in roles:
                engines.language = build_language(model_dir, config, executor())
                engines.language.forward = Watched(engines.language.forward, self.seen)
            if "prefill" in roles:
                send_kv(engines.language)
            self.cluster.add(
                name,
                tuple(roles),
                engines,
                engine=config,
                prefill=PrefillConfig(min_early_tokens=1),
                encode=EncodeConfig(max_batch_patches=1),
            )

    async def play(self, asked: list[Question], rounds: int = 1) -> None:
        async with self.cluster.running():
            for _ in range(rounds):
                await asyncio.gather(*map(self._compare, asked))
                await self.cluster.settle()

    async def _compare(self, asked: Question) -> None:
        sampling = msgspec.structs.replace(asked.generation.sampling, num_logprobs=-1)
        stream = self.cluster.gateway.role.submit(
            type(asked.generation)(asked.generation.token_ids, asked.generation.items, sampling)
        )
        said: list[int] = []
        async for update in stream:
            assert update.error is None, update.error
            said += update.token_ids
        assert said == asked.token_ids
        for index, expected in enumerate(asked.logits):
            computed = [
                logits
                for logits, drafts in self.seen[stream.request_id, index]
                if drafts == tuple(said[index - len(drafts) : index])  # else: behind a wrong one
            ]
            assert computed, f"position {index} was not computed"
            for logits in computed:
                worst = (logits - expected).abs().max().item()
                assert worst < TOLERANCE, f"logits of position {index} differ by {worst:.1e}"

    @property
    def num_drafted(self) -> int:
        return sum(bool(drafts) for rows in self.seen.values() for _, drafts in rows)

    def total(self, what: str) -> int:
        found = [instance.requests for instance in self.cluster.instances.values()]
        return sum(requests.totals[what] for requests in found if requests is not None)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_transformers(case: dict[str, Any]) -> None:
    directory = model_dir(case["family"])
    asked = questions(directory, tight=case["tight"])
    layout = kv_layout(directory)
    most = (max(map(num_tokens, asked)) * 3 // 2 // 16 + 2) * 16 if case["tight"] else 2048
    num_blocks = layout.rows.count(most)
    config = msgspec.structs.replace(
        CONFIG,
        kv_nbytes=num_blocks * layout.block_nbytes,
        max_chunk_tokens=case["chunk"],
        prefix_caching=case["caching"],
        async_scheduling=case["ahead"],
        speculative=NGRAM if case["drafting"] else SpeculativeConfig(),
    )
    served = Served(directory, case["topology"], config)
    asyncio.run(served.play(asked, rounds=1 if case["tight"] else 2))
    assert bool(served.total("preemptions")) is case["tight"]
    # In their answers, what an n-gram draft needs.
    repeats = case["family"] not in ("kimi_k25", "ministral3")
    if not case["drafting"] or (repeats and not case["ahead"]):  # ahead none is waited for
        assert bool(served.num_drafted) is case["drafting"]
    if not case["tight"]:
        assert bool(served.total("prefix_cache_hit_tokens")) is case["caching"]


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
@pytest.mark.parametrize(
    "family",
    [
        *("glm46v", "gemma4_moe"),
        *(pytest.param(f, marks=pytest.mark.long) for f in ("glm4v", "internvl", "gemma4")),
    ],
)
def test_videos_among_images(family: str, topology: str) -> None:
    """Rows of both have one placeholder, or chunks of which none may cut a frame."""
    directory = model_dir(family)
    few = msgspec.structs.replace(CONFIG, max_chunk_tokens=48)
    asked = [asyncio.run(ask_case(case, 6, directory)) for case in cases(family)[1:]]
    asyncio.run(Served(directory, topology, few).play(asked, rounds=2))


def test_every_pair_is_covered() -> None:
    """And the cases are the same in every run."""
    assert pairwise(DIMENSIONS) == pairwise(DIMENSIONS)
    covered = set().union(*map(pairs_of, pairwise(DIMENSIONS)))
    assert covered == set().union(*map(pairs_of, everything(DIMENSIONS)))


# --- the comparison can fail ----------------------------------------------------------------------


class Spoiling:
    """A tower that damages one row of each image."""

    def __init__(self, tower: Any, damage: Damage) -> None:
        self.contract, self.max_batches = tower.contract, tower.max_batches
        self.patch_s = tower.patch_s
        self.preprocess = tower.preprocess
        self._tower, self._damage = tower, damage

    async def encode(self, batch: Sequence[Any]) -> list[Any]:
        return [self._spoilt(rows) for rows in await self._tower.encode(batch)]

    def _spoilt(self, rows: Rows) -> Rows:
        tensor = rows.tensor.clone()
        self._damage(tensor)
        return Rows(tensor, rows.num_rows, rows.nbytes)


def zero_row(tensor: torch.Tensor) -> None:
    tensor[3] = 0


def swap_rows(tensor: torch.Tensor) -> None:
    tensor[[2, 3]] = tensor[[3, 2]]


def zero_block(views: list[Any]) -> list[Any]:
    return [memoryview(bytes(len(views[0]))), *views[1:]]


def swap_blocks(views: list[Any]) -> list[Any]:
    return [views[-1], *views[1:-1], views[0]]


def wrong_block(views: list[Any]) -> list[Any]:
    return [views[1], *views[1:]]


@pytest.mark.parametrize("topology", INSTANCES)
@pytest.mark.parametrize(
    ("family", "damage"),
    [
        ("embedded", zero_row),
        ("qwen2_5_vl", swap_rows),
        pytest.param("embedded", swap_rows, marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", zero_row, marks=pytest.mark.long),
    ],
)
def test_one_wrong_row_is_noticed(family: str, damage: Damage, topology: str) -> None:
    directory = model_dir(family)
    tower = Spoiling(vision(directory), damage)
    served = Served(directory, topology, CONFIG, tower)
    with pytest.raises(AssertionError, match=WRONG):
        asyncio.run(served.play([golden(directory, "what is it?", 1, 6)]))


MORE_DAMAGES = [
    ("embedded", wrong_block),
    ("kimi_k25", zero_block),
    ("kimi_k25", swap_blocks),
    *(("qwen3_vl_moe", damage) for damage in (zero_block, swap_blocks, wrong_block)),
]


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        ("embedded", zero_block),
        ("embedded", swap_blocks),
        ("kimi_k25", wrong_block),
        *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_DAMAGES),
    ],
)
def test_one_wrong_block_on_its_way_is_noticed(family: str, damage: Damage) -> None:
    """From P to D: a block of zeros, one of other tokens, or the first and last exchanged.

    (Two full blocks may change places: keys carry their positions.)
    """

    def send_kv(engine: TorchLanguageEngine) -> None:
        fetch = engine.fetch_kv

        async def fetch_wrong(slots: Sequence[int], *, in_place: bool) -> list[Any]:
            return damage(list(await fetch(slots, in_place=in_place)))

        engine.fetch_kv = fetch_wrong  # type: ignore[method-assign]

    directory = model_dir(family)
    served = Served(directory, "1e1p1d", CONFIG, send_kv=send_kv)
    asked = golden(directory, "what is it?", 1, 6)
    assert len(asked.generation.token_ids) % 16  # the last block is not full
    with pytest.raises(AssertionError, match=WRONG):
        asyncio.run(served.play([asked]))
