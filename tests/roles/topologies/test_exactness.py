"""However the scheduler cuts and repeats the work, tokens and logits are those of transformers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from epd.config import EncodeConfig, EngineConfig, PrefillConfig
from epd.engine.base import Patches, Rows, StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Leave
from epd.roles.compose import Engines
from epd.scheduling.prefix_keys import PrefixKeys
from epd.tiny import CHECKPOINT
from tests.engine.conftest import drawn_image
from tests.patience import PATIENCE_S
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import Question, answer, ask, ask_all, assert_exact, question

LONG = pytest.mark.long
BLOCK_NBYTES = 65536
SMALL = EngineConfig(kv_nbytes=96 * BLOCK_NBYTES, threads=1)
TOPOLOGIES = {
    "1epd": [("epd0", "encode", "prefill", "decode")],
    "1e1p1d": [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")],
}
EVERY = TOPOLOGIES | {"1e1pd": [("e0", "encode"), ("pd0", "prefill", "decode")]}


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    executor = build_executor(SMALL)
    return {"executor": executor, "vision": build_vision(CHECKPOINT, SMALL, executor)}


def zeroed(rows: Rows) -> Rows:
    """One row is nothing."""
    tensor = rows.tensor.clone()
    tensor[3] = 0
    return Rows(tensor, rows.num_rows, rows.nbytes)


def swapped(rows: Rows) -> Rows:
    """Two rows stand in each other's place."""
    tensor = rows.tensor.clone()
    tensor[[2, 3]] = tensor[[3, 2]]
    return Rows(tensor, rows.num_rows, rows.nbytes)


DAMAGES = {"zeroed": zeroed, "swapped": swapped}


class SlowVision:
    """Gives up image after image, each when it is told to; `damage` may change rows."""

    def __init__(self, vision: Any, damage: Callable[[Rows], Rows] = lambda rows: rows) -> None:
        self.contract, self.max_batches = vision.contract, vision.max_batches
        self.patch_s = vision.patch_s
        self.preprocess = vision.preprocess
        self._vision = vision
        self._damage = damage
        self.may_give = asyncio.Semaphore(0)

    async def encode(self, batch: Sequence[Patches]) -> list[Any]:
        rows: list[Any] = []
        for patches in batch:
            await self.may_give.acquire()
            rows += map(self._damage, await self._vision.encode([patches]))
        return rows


@asynccontextmanager
async def serving(
    shared: dict[str, Any], topology: str = "1epd", vision: Any = None, **settings: Any
) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    config = msgspec.structs.replace(SMALL, **settings)
    for name, *roles in EVERY[topology]:
        engines = Engines(vision=(vision or shared["vision"]) if "encode" in roles else None)
        if "prefill" in roles or "decode" in roles:
            engines.language = build_language(CHECKPOINT, config, shared["executor"])
        early = PrefillConfig(min_early_tokens=1)
        encode = EncodeConfig(max_batch_patches=1)  # one image at a time
        cluster.add(name, tuple(roles), engines, engine=config, prefill=early, encode=encode)
    async with cluster.running():
        yield cluster
        await cluster.settle()


def total(cluster: Cluster, kind: str) -> int:
    batches = [instance.requests for instance in cluster.instances.values()]
    return sum(batch.totals[kind] for batch in batches if batch is not None)


@pytest.mark.parametrize(
    ("chunk", "caching", "ahead"),
    [
        (16, True, True),
        pytest.param(1, True, True, marks=LONG),
        pytest.param(16, False, False, marks=LONG),
        pytest.param(1, False, False, marks=LONG),
        *(pytest.param(n, i, i, marks=LONG) for n in (7, 64, 1024) for i in (False, True)),
    ],
)
async def test_any_chunk_size(
    chunk: int, caching: bool, ahead: bool, shared: dict[str, Any]
) -> None:
    """Text and images together, prompts in chunks between decodes; then all of it again."""
    asked = [await question("hello"), await question("what?", 1), await question("both", 2)]
    async with serving(
        shared, max_chunk_tokens=chunk, prefix_caching=caching, async_scheduling=ahead
    ) as cluster:
        for _ in range(2):
            await ask_all(cluster.gateway, asked)
        assert total(cluster, "preemptions") == 0
        assert bool(total(cluster, "prefix_cache_hit_tokens")) is caching


@pytest.mark.parametrize(
    ("caching", "ahead"), [pytest.param(False, True, marks=LONG), (True, True)]
)
@pytest.mark.parametrize("topology", [pytest.param("1epd", marks=LONG), "1e1p1d"])
async def test_who_gives_way_says_the_same(
    topology: str, caching: bool, ahead: bool, shared: dict[str, Any]
) -> None:
    """F24: blocks for one answer and a half: the younger ones are computed again and again."""
    texts = ["hello", "a longer question than that", "why?", "how?"]
    asked = [await question(text, max_tokens=60) for text in texts]
    asked.append(await question("what?", 1, max_tokens=20))
    needed = max(len(q.generation.token_ids) + len(q.token_ids) for q in asked)
    size = needed * 2 // 16 * BLOCK_NBYTES
    settings = {"kv_nbytes": size, "prefix_caching": caching, "async_scheduling": ahead}
    async with serving(shared, topology, max_chunk_tokens=7, **settings) as cluster:
        await ask_all(cluster.gateway, asked)
        assert total(cluster, "preemptions") >= 2


@pytest.mark.parametrize("topology", [pytest.param("1epd", marks=LONG), "1e1p1d"])
async def test_the_second_turn_computes_only_what_is_new(
    topology: str, shared: dict[str, Any]
) -> None:
    """And encodes nothing; another image of the same size in its place is another text."""
    images = [drawn_image(1, 64, 64), drawn_image(2, 48, 80)]
    first = await ask([(2, "what is this? " * 4)], images)
    turns = [(2, "what is this? " * 4), "two images", "and now?"]
    second, other = await ask(turns, images), await ask(turns, [images[0], drawn_image(3, 48, 80)])
    async with serving(shared, topology) as cluster:
        await ask_all(cluster.gateway, [first])
        encoded = num_encoded(cluster)
        await ask_all(cluster.gateway, [second])
        known = len(first.generation.token_ids) // 16 * 16
        assert num_encoded(cluster) == encoded == 2
        for instance in cluster.instances.values():  # of prefill and of decode
            if instance.requests is not None:
                assert instance.requests.totals["prefix_cache_hit_tokens"] >= known - 16
        hits = total(cluster, "prefix_cache_hit_tokens")
        await ask_all(cluster.gateway, [other])
        equal = other.generation.items[1].offset * (2 if topology == "1e1p1d" else 1)
        assert total(cluster, "prefix_cache_hit_tokens") - hits <= equal


async def test_a_wrong_block_is_noticed(shared: dict[str, Any]) -> None:
    """The comparison of this file can fail: a block found by its key holds something else."""
    asked = await question("a text that fills some blocks, and is asked twice")
    async with serving(shared) as cluster:
        await ask_all(cluster.gateway, [asked])
        requests = cluster.instances["epd0"].requests
        assert requests is not None
        keys = PrefixKeys(16, (), asked.generation.scope).extend(
            lambda a, b: asked.generation.token_ids[a:b], 48
        )
        (block, *_) = requests.pool.find(keys)
        requests.engine.pool.views([block])[0][:] = bytes(BLOCK_NBYTES)
        said = await answer(cluster.gateway, asked)
    with pytest.raises(AssertionError):
        assert_exact(said, asked)


def change_sampling(asked: Question, **changes: Any) -> None:
    sampling = msgspec.structs.replace(asked.generation.sampling, **changes)
    object.__setattr__(asked.generation, "sampling", sampling)


def num_encoded(cluster: Cluster) -> int:
    counts = [i.actor.journal.transitions for i in cluster.instances.values()]
    return sum(
        n
        for c in counts
        for t, n in c.items()
        if t.machine == "ENCODING" and t.target == "ENCODING"
    )


async def until_parked(cluster: Cluster, times: int) -> None:
    """Until a prompt has come to wait in its middle so many times."""
    async with asyncio.timeout(PATIENCE_S):
        while num_parked(cluster) < times:
            await asyncio.sleep(0.005)


def num_parked(cluster: Cluster) -> int:
    return num_entered(cluster, "WAITING_MID_PROMPT")


def num_entered(cluster: Cluster, state: str) -> int:
    counts = [i.actor.journal.transitions for i in cluster.instances.values()]
    return sum(n for c in counts for t, n in c.items() if t.target == state)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_prompt_waits_for_each_of_its_images(topology: str, shared: dict[str, Any]) -> None:
    """F10: three images come one by one; text passes; every wait is in the middle."""
    vision = SlowVision(shared["vision"])
    asked = await question("all of them", 3)
    async with serving(shared, topology, vision) as cluster:
        waiting = asyncio.create_task(answer(cluster.gateway, asked))
        for image in range(3):
            await until_parked(cluster, image + 1)
            await ask_all(cluster.gateway, [await question("hello", max_tokens=4)])
            assert num_parked(cluster) == image + 1
            vision.may_give.release()
        assert_exact(await waiting, asked)


async def test_a_step_runs_ahead(shared: dict[str, Any]) -> None:
    """The step after one is launched before that one is over: with tokens that nobody knows yet.

    Who stops at a token rather than at its limit is computed once too often, and says no more;
    who needs the host for each token (here to keep an end from coming) waits for it beside others.
    """
    long = await question("hello", max_tokens=30)
    end = long.token_ids[11]
    num_said = long.token_ids.index(end) + 1
    stops = Question(
        long.generation, long.token_ids[:num_said], long.logprobs[:num_said], long.logits
    )
    change_sampling(stops, stop_token_ids=(end,))
    waits = await question("why?", max_tokens=12)
    change_sampling(waits, min_tokens=12)
    seen = Counter[tuple[bool, bool]]()
    async with serving(shared, async_scheduling=True) as cluster:
        requests = cluster.instances["epd0"].requests
        assert requests is not None
        step = requests.engine.step
        pictured = await question("what?", 1, max_tokens=30)
        await ask_all(cluster.gateway, [pictured])  # once its rows are there it joins with others

        def watch(batch: Sequence[StepSequence], on_layers: Any = None) -> Any:
            for sequence in batch:
                waiting = sequence.sample is not None and sequence.sample.min_tokens > 0
                seen[sequence.is_pending, waiting] += 1
            return step(batch, on_layers)

        requests.engine.step = watch  # type: ignore[method-assign]
        await ask_all(cluster.gateway, [stops, waits, pictured])
    # Who joins late is met by a step that does not run ahead: a few less on a busy machine.
    assert seen[True, False] > 20
    assert seen[True, True] > 4, "who asks for more runs ahead, too"
    assert num_entered(cluster, "FINISHING") == 1


async def test_who_waits_in_its_middle_can_leave(shared: dict[str, Any]) -> None:
    """F43, F21: blocks and rows come back, and the abandoned load is kept for the next one."""
    vision = SlowVision(shared["vision"])
    asked = await question("both", 2)
    async with serving(shared, "1e1p1d", vision) as cluster:
        stream = cluster.gateway.role.submit(asked.generation)
        vision.may_give.release()
        await until_parked(cluster, 1)
        stream.cancel(Leave.GONE, "client disconnected")
        vision.may_give.release()
        vision.may_give.release()
        await cluster.settle()
        await ask_all(cluster.gateway, [asked])


@pytest.mark.parametrize("damage", DAMAGES)
async def test_one_wrong_row_is_noticed(damage: str, shared: dict[str, Any]) -> None:
    """The comparison of this file can fail."""
    vision = SlowVision(shared["vision"], DAMAGES[damage])
    vision.may_give.release()
    asked = await question("what?", 1)
    async with serving(shared, vision=vision) as cluster:
        said = await answer(cluster.gateway, asked)
    with pytest.raises(AssertionError):
        assert_exact(said, asked)


async def test_a_lower_priority_goes_first(shared: dict[str, Any]) -> None:
    """With blocks for one, what came earlier and can wait is answered after what is urgent."""
    texts = {"first": 0, "late": 5, "urgent": -5}
    asked = [await question(text, max_tokens=12) for text in texts]
    for one, priority in zip(asked, texts.values(), strict=True):
        change_sampling(one, priority=priority)
    ended: list[int] = []
    async with serving(shared, kv_nbytes=4 * BLOCK_NBYTES) as cluster:

        async def ask_one(index: int) -> None:
            assert_exact(await answer(cluster.gateway, asked[index]), asked[index])
            ended.append(index)

        await asyncio.gather(*map(ask_one, range(3)))
    assert ended[-1] == 1
