"""Whole topologies that speculate say, token for token, what transformers says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest

from epd.api.asked.grammar import to_grammar
from epd.api.asked.structured import Constraint
from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.base import StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.frontend import Generation
from epd.fsm.request import (
    FirstTokenSampled,
    LastTokenSampled,
    Request,
    Scheduled,
    StepLaunched,
    TextOnly,
)
from epd.messages import NoRepeat, SamplingParams, TokenLogprobs
from epd.roles.compose import Engines, Gateway
from epd.roles.steps.record import Record
from epd.roles.steps.speculation import Speculation
from epd.roles.steps.step import token_event, until_end
from epd.scheduling.prefix_keys import PrefixKeys
from epd.tiny import CHECKPOINT
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import Question, ask_all, question

BLOCK_NBYTES = 65536
TOPOLOGIES = {
    "1epd": [("epd0", "encode", "prefill", "decode")],
    "1e1pd": [("e0", "encode"), ("pd0", "prefill", "decode")],
    "1e1p1d": [("e0", "encode"), ("p0", "prefill"), ("d0", "decode")],
}
NGRAM = SpeculativeConfig("ngram", 4, 1, 3)  # one token is enough to draft: many are wrong


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    config = EngineConfig(threads=1)
    executor = build_executor(config)
    return {"executor": executor, "vision": build_vision(CHECKPOINT, config, executor)}


def cluster_of(shared: dict[str, Any], topology: str, config: EngineConfig) -> Cluster:
    cluster = Cluster()
    for name, *roles in TOPOLOGIES[topology]:
        engines = Engines(vision=shared["vision"] if "encode" in roles else None)
        if "prefill" in roles or "decode" in roles:
            engines.language = build_language(CHECKPOINT, config, shared["executor"])
        cluster.add(name, tuple(roles), engines, engine=config)
    return cluster


def total(cluster: Cluster, kind: str) -> int:
    batches = [instance.requests for instance in cluster.instances.values()]
    return sum(batch.totals[kind] for batch in batches if batch is not None)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Answers of the bundled model repeat themselves; some prompts already hold their answer."""

    async def ask() -> list[Question]:
        return [
            await question("one two three one two three one two three one two", max_tokens=40),
            await question("what?", 1, max_tokens=40),
            await question("both both both", 2, max_tokens=20),
            await question("hello", max_tokens=2),
            await question("hello", max_tokens=1),
        ]

    return asyncio.run(ask())


async def tokens_of(gateway: Gateway, asked: Generation) -> list[int]:
    tokens: list[int] = []
    async for update in gateway.role.submit(asked):
        assert update.error is None, update.error
        tokens += update.token_ids
    return tokens


@pytest.mark.parametrize(
    ("topology", "num_blocks"),
    [
        ("1e1p1d", 96),
        ("1epd", 11),
        *(pytest.param(t, 96, marks=pytest.mark.long) for t in ("1epd", "1e1pd")),
    ],
)
async def test_drafts_change_no_token(
    topology: str, num_blocks: int, shared: dict[str, Any], questions: list[Question]
) -> None:
    """Twice, so that the second time finds blocks that drafts have run through; with few blocks,
    requests give way to each other while they draft."""
    config = EngineConfig(
        kv_nbytes=num_blocks * BLOCK_NBYTES,
        threads=1,
        speculative=NGRAM,
        async_scheduling=True,
        max_chunk_tokens=16,
    )
    cluster = cluster_of(shared, topology, config)
    async with cluster.running():
        for _ in range(2):
            await ask_all(cluster.gateway, questions)
        await cluster.settle()
    drafts = total(cluster, "spec_decode_num_drafts")
    drafted = total(cluster, "spec_decode_num_draft_tokens")
    accepted = total(cluster, "spec_decode_num_accepted_tokens")
    assert 0 < drafts <= drafted <= 4 * drafts
    assert 0 < accepted < drafted
    assert total(cluster, "prefix_cache_hit_tokens") > 0
    assert bool(total(cluster, "preemptions")) is (num_blocks < 96)


RUNS = NoRepeat(ngram_size=2, window_size=12, whitelist_token_ids=(97,))
WISHES: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.7, "seed": 5},
    "penalties": {"repetition_penalty": 1.05, "num_logprobs": 2},
    "counted": {"frequency_penalty": 0.1, "presence_penalty": 0.2, "logit_bias": ((98, 1.0),)},
    "bad words": {"bad_words": ((97, 98, 97), (99,)), "min_tokens": 20},
    "runs": {"no_repeat_ngram": RUNS, "repetition_penalty": 0.5},
    "grammar": {"grammar": to_grammar(Constraint("regex", "(ab|cd|abab)+", ""))},
}


EVERY_WAY = tuple(product((SpeculativeConfig(), NGRAM), (False, True)))


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param((EVERY_WAY[0], EVERY_WAY[-1]), id="neither-and-both"),
        pytest.param(EVERY_WAY, id="every-way", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "what",  # tests/engine/language/test_speculation.py has each of them, too
    [w if w == "grammar" else pytest.param(w, marks=pytest.mark.long) for w in WISHES],
)
async def test_any_sampling_says_the_same(
    what: str, ways: Sequence[tuple[SpeculativeConfig, bool]], shared: dict[str, Any]
) -> None:
    """With and without speculation, one step after the other and ahead: equal tokens and counts
    that add up; and nobody who has no drafts sits out a step."""
    prompt = (await question("ababababababab cd", max_tokens=2)).generation
    sampling = SamplingParams(max_tokens=40, **WISHES[what])
    prepared = type(prompt)(prompt.token_ids, prompt.items, sampling)
    said = []
    for speculative, ahead in ways:
        config = EngineConfig(
            kv_nbytes=32 * BLOCK_NBYTES, threads=1, speculative=speculative, async_scheduling=ahead
        )
        cluster = cluster_of(shared, "1epd", config)
        pending = count_pending(cluster)
        tokens: list[int] = []
        accepted = 0
        async with cluster.running() as gateway:
            async for update in gateway.role.submit(prepared):
                assert update.error is None, update.error
                tokens += update.token_ids
                accepted += update.num_accepted
        assert accepted == total(cluster, "spec_decode_num_accepted_tokens")
        if not speculative.method:
            assert len(pending) >= len(tokens) * ahead / 2
        assert ahead or not pending
        said.append(tokens)
    assert said == [said[0]] * len(ways)
    assert accepted > 0


async def test_no_run_comes_twice_where_the_youngest_gives_way(shared: dict[str, Any]) -> None:
    """It computes its tokens again, and those before a preemption bind those behind it."""
    prompt = (await question("ababababababab cd", max_tokens=2)).generation
    wishes = {}, {"seed": 1}, {"no_repeat_ngram": NoRepeat(ngram_size=2, window_size=100)}
    asked = [
        type(prompt)(prompt.token_ids, prompt.items, SamplingParams(max_tokens=40, **wish))
        for wish in wishes
    ]
    said = []
    for num_blocks in (96, 11):
        config = EngineConfig(kv_nbytes=num_blocks * BLOCK_NBYTES, threads=1)
        cluster = cluster_of(shared, "1epd", config)
        async with cluster.running() as gateway:
            said.append(await asyncio.gather(*(tokens_of(gateway, one) for one in asked)))
            await cluster.settle()
        assert bool(total(cluster, "preemptions")) is (num_blocks < 96)
    assert said[0] == said[1]
    pairs = list(pairwise(said[0][-1]))
    assert len(set(pairs)) == len(pairs)


def test_who_has_something_to_draft_from_waits_for_its_last_token() -> None:
    """While a step samples it; the others run ahead, and so does everybody where steps are full."""
    speculation = Speculation(SpeculativeConfig("ngram", 4, 2, 3), Counter(), {}, lambda: 0.0)
    for text, has_room, waits in (
        ([1, 2, 3, 4, 1, 2], True, True),
        ([1, 2, 3, 4, 1, 2], False, False),
        ([1, 2, 3, 4, 5, 6], True, False),
    ):
        message = SimpleNamespace(
            request_id="r",
            attempt=1,
            sampling=SamplingParams(max_tokens=9),
            gateway=None,
            deadline_s=0,
            items=(),
            num_emitted=0,
        )
        request = Request("r/1", message, tuple(text), decode_here=True)
        record = Record(PrefixKeys(4, (), ""))
        request.fire(TextOnly())
        request.fire(Scheduled((3,), len(text) - 1))
        request.fire(StepLaunched(1, ahead=True))
        assert speculation.draft(request, record, has_room=has_room) == waits
        assert record.drafts == () and request.num_left == 1
        request.fire(FirstTokenSampled(TokenLogprobs(3, 0.0)))
        assert not speculation.draft(request, record, has_room=has_room)
        assert request.num_left == 1
        assert bool(record.drafts) == (text[4] == 1)


@pytest.mark.parametrize("num_moved", [0, 1, 3, 6, 7])
@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(0, 99), (5, 99), (7, 99), (8, 9), (0, 4)])
def test_an_answer_ends_where_it_would_have_ended_before_it_moved(
    num_moved: int, min_tokens: int, max_tokens: int
) -> None:
    """Which of the tokens behind drafts end it: those of earlier attempts count."""
    end = 3
    said = [TokenLogprobs(t, 0.0) for t in (10, 11, end, 12, 13, 14, end, 15, end, 16)]
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(end,))
    ends = [
        count
        for count, token in enumerate(said, 1)
        if count == max_tokens or (token.token_id == end and count > min_tokens)
    ]
    if ends[0] <= num_moved:
        return  # it has ended where it was
    message: Any = SimpleNamespace(
        sampling=sampling,
        gateway=None,
        deadline_s=0,
        items=(),
        num_emitted=num_moved,
        request_id="r",
        attempt=2,
    )
    request = Request("r/2", message, tuple(range(20, 24 + num_moved)))
    counted = until_end(request, said[num_moved:])
    assert num_moved + len(counted) == ends[0]
    event = token_event(request, counted, decoding=True)
    assert isinstance(event, LastTokenSampled)
    assert event.finish_reason == ("stop" if said[ends[0] - 1].token_id == end else "length")


@pytest.mark.parametrize(("config", "num_left"), [(SpeculativeConfig(), 1), (NGRAM, -1)])
def test_nothing_is_looked_up_in_vain(config: SpeculativeConfig, num_left: int) -> None:
    """Without a method, and while drafts are under way."""
    request: Any = SimpleNamespace(num_left=num_left, key="r/1")  # nothing else is asked of it
    record = Record(PrefixKeys(4, (), ""))
    batch: Any = SimpleNamespace(decoding=[request], has_spare_places=True, num_running=1)
    assert Speculation(config, Counter(), {"r/1": record}, lambda: 0.0).draft_all(batch) == []
    assert record.lookup is None


def count_pending(cluster: Cluster) -> list[StepSequence]:
    """Grows by each sequence whose token is on its way when its step is launched."""
    requests = cluster.instances["epd0"].requests
    assert requests is not None
    step = requests.engine.step
    pending: list[StepSequence] = []

    def watch(batch: Sequence[StepSequence], on_layers: Any = None) -> Any:
        pending.extend(sequence for sequence in batch if sequence.is_pending)
        return step(batch, on_layers)

    requests.engine.step = watch  # type: ignore[method-assign]
    return pending
