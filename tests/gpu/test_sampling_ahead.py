"""Sampling of all kinds, speculation and running ahead, together on a GPU."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.base import PENDING, StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.messages import SamplingParams, TokenLogprobs
from epd.roles.compose import Engines
from epd.tiny import CHECKPOINT
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import question
from tests.roles.topologies.test_speculation import NGRAM, WISHES, count_pending, total

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def engines(cuda: str) -> dict[str, Any]:
    config = EngineConfig(device=cuda, dtype="float32", kv_nbytes=64 << 20, threads=2)
    executor = build_executor(config)
    return {
        "vision": build_vision(CHECKPOINT, config, executor),
        "language": build_language(CHECKPOINT, config, executor, 16),
    }


@pytest.mark.parametrize("what", WISHES)
async def test_steps_launched_at_once_say_what_they_say_alone(
    what: str, engines: dict[str, Any]
) -> None:
    """Each is launched before the tokens of the one before it are known here."""
    language: TorchLanguageEngine = engines["language"]
    params = SamplingParams(max_tokens=30, **WISHES[what])
    prompt = tuple((await question("ababababababab cd", max_tokens=2)).generation.token_ids)
    blocks = tuple(range(1, 40))

    def step(ids: tuple[int, ...], start: int, said: list[int], index: int) -> list[StepSequence]:
        return [
            StepSequence(
                what, ids, start, blocks, None,
                sample=params, output_index=index, prompt_ids=prompt, output_ids=said,
            )
        ]  # fmt: skip

    async def token(sequences: list[StepSequence]) -> TokenLogprobs:
        (outcome,) = (await language.step(sequences)).outcomes
        assert isinstance(outcome, TokenLogprobs), outcome
        return outcome

    alone = [await token(step(prompt, 0, [], 0))]
    for index in range(1, 12):
        said = [one.token_id for one in alone]
        alone.append(await token(step((said[-1],), len(prompt) + index - 1, said, index)))
    ahead = [await token(step(prompt, 0, [], 0))]
    said = [ahead[0].token_id]
    under_way = asyncio.ensure_future(language.step(step((said[-1],), len(prompt), said, 1)))
    for index in range(2, 12):
        place = len(prompt) + index - 1
        behind = asyncio.ensure_future(language.step(step((PENDING,), place, said[:index], index)))
        (outcome,) = (await under_way).outcomes
        ahead.append(outcome)
        said.append(outcome.token_id)
        under_way = behind
    ahead.append((await under_way).outcomes[0])
    assert ahead == alone


async def test_sampling_speculation_and_running_ahead(engines: dict[str, Any]) -> None:
    """All kinds of sampling in one batch; drafts or none, ahead or not: equal tokens, and with
    both some steps have drafts and some a token that is on its way."""
    prompt = (await question("ababababababab cd", max_tokens=2)).generation
    said = []
    for speculative, ahead in product((SpeculativeConfig(), NGRAM), (False, True)):
        config = EngineConfig(
            device="cuda", speculative=speculative, async_scheduling=ahead, prefix_caching=False
        )
        cluster = Cluster()
        made = Engines(vision=engines["vision"], language=engines["language"])
        cluster.add("epd0", ("encode", "prefill", "decode"), made, engine=config)
        pending = count_pending(cluster)

        async def ask(gateway: Any, wish: dict[str, Any]) -> list[int]:
            sampling = SamplingParams(max_tokens=NUM_TOKENS, **wish)
            tokens: list[int] = []
            generation = type(prompt)(prompt.token_ids, prompt.items, sampling)
            async for update in gateway.role.submit(generation):
                assert update.error is None, update.error
                tokens += update.token_ids
            return tokens

        async with cluster.running() as gateway:
            asked = (ask(gateway, wish) for wish in WISHES.values())
            said.append(await asyncio.gather(*asked))
            confirmed = total(cluster, "spec_decode_num_accepted_tokens")
        assert bool(confirmed) == bool(speculative.method)
        assert ahead or not pending
        if ahead and not speculative.method:
            assert len(pending) > NUM_TOKENS * len(WISHES) / 2, "somebody sits out steps"
    assert said == [said[0]] * 4
