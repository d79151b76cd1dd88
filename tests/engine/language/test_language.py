"""Steps: what is wrong with one sequence never costs another, and stale memory is never read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from epd.engine.base import EngineError, Rows, RowSpan, StepFailure, StepSequence
from epd.engine.language.engine import TorchLanguageEngine
from epd.messages import SamplingParams, TokenLogprobs
from tests.engine.driver import Driver

GREEDY = SamplingParams(max_tokens=9)
PROMPT = list(b"the quick brown fox jumps")


def sequence(name: str, blocks: list[int], **changes: Any) -> StepSequence:
    fields: dict[str, Any] = {
        "request_id": name,
        "token_ids": PROMPT,
        "start": 0,
        "block_table": blocks,
        "positions": None,
        "sample": GREEDY,
    }
    return StepSequence(**(fields | changes))


@pytest.fixture
def language(driver: Callable[[str], Driver]) -> TorchLanguageEngine:
    return driver("qwen3_vl").language


def row_span(language: TorchLanguageEngine, num_rows: int, **changes: Any) -> RowSpan:
    assert language.row_contract is not None
    rows = torch.zeros(num_rows, language.row_contract.row_width)
    span = RowSpan(at=2, row_start=0, count=4, rows=Rows(rows, num_rows, rows.nbytes))
    return replace(span, **changes)


BAD: dict[str, Callable[[TorchLanguageEngine], dict[str, Any]]] = {
    "no tokens": lambda _: {"token_ids": []},
    "token outside the vocabulary": lambda _: {"token_ids": [5, 272]},
    "negative token": lambda _: {"token_ids": [-1]},
    "too few blocks": lambda _: {"block_table": [1]},
    "copy from outside the pool": lambda engine: {"copies": [(engine.num_blocks, 1)]},
    "block outside the pool": lambda engine: {"block_table": [1, engine.num_blocks]},
    "beyond the context": lambda _: {"start": 2047, "block_table": list(range(140))},
    "positions of another length": lambda _: {"positions": [[0], [0], [0]]},
    "two axes": lambda _: {"positions": [PROMPT, PROMPT]},
    "span beyond the chunk": lambda engine: {"spans": [row_span(engine, 4, at=23)]},
    "span beyond the rows": lambda engine: {"spans": [row_span(engine, 3)]},
    "torn rows": lambda engine: {"spans": [row_span(engine, 4, rows=[memoryview(bytes(999))])]},
    "bias outside the vocabulary": lambda _: {
        "sample": SamplingParams(max_tokens=1, logit_bias=((272, 1.0),))
    },
    "rows that are not finite": lambda engine: {
        "spans": [row_span(engine, 4, rows=_nan_rows(engine))]
    },
}


def _nan_rows(language: TorchLanguageEngine) -> Rows:
    assert language.row_contract is not None
    rows = torch.full((4, language.row_contract.row_width), torch.nan)
    return Rows(rows, 4, rows.nbytes)


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_sequence_fails_alone(kind: str, language: TorchLanguageEngine) -> None:
    good = [sequence("a", [3, 4]), sequence("c", [5, 6], token_ids=PROMPT[::-1])]
    expected = (await language.step(good)).outcomes
    bad = sequence("b", [1, 2], **BAD[kind](language))
    result = await language.step([good[0], bad, good[1]])
    assert [result.outcomes[0], result.outcomes[2]] == expected
    assert isinstance(result.outcomes[1], StepFailure) and result.outcomes[1].reason


async def test_only_the_last_chunk_samples(language: TorchLanguageEngine) -> None:
    whole = (await language.step([sequence("a", [1, 2])])).outcomes
    first = await language.step([sequence("a", [3, 4], token_ids=PROMPT[:9], sample=None)])
    assert first.outcomes == [None]
    rest = await language.step([sequence("a", [3, 4], token_ids=PROMPT[9:], start=9)])
    assert rest.outcomes == whole


async def test_an_empty_or_all_bad_batch_gives_no_forward(language: TorchLanguageEngine) -> None:
    assert (await language.step([])).outcomes == []
    (outcome,) = (await language.step([sequence("a", [])])).outcomes
    assert isinstance(outcome, StepFailure)


async def test_a_failing_forward_is_an_engine_error(
    language: TorchLanguageEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        pool = language.pool

        def __call__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(language, "forward", Failing())
    with pytest.raises(EngineError, match="out of memory"):
        await language.step([sequence("a", [1, 2])])


@pytest.mark.parametrize("count", [1, 25])
async def test_what_a_former_tenant_left_is_never_read(
    count: int, language: TorchLanguageEngine
) -> None:
    """NaN in reused blocks: masked, it would still poison the sums of whoever decodes there."""
    clean = sequence("a", [7, 8, 9])
    first = (await language.step([clean])).outcomes
    decode = sequence("a", [7, 8, 9], token_ids=[65], start=len(PROMPT))
    second = (await language.step([decode])).outcomes
    language.pool.tensor[[7, 8, 9]] = torch.nan
    neighbour = sequence("n", [3, 4, 5], token_ids=PROMPT[:count])
    assert (await language.step([clean, neighbour])).outcomes[0] == first[0]
    again = sequence("n", [3, 4, 5], token_ids=[66], start=count)
    assert (await language.step([decode, again])).outcomes[0] == second[0]
    assert not isinstance(first[0], StepFailure)


async def test_a_neighbour_with_nan_in_its_history_fails_alone(
    language: TorchLanguageEngine,
) -> None:
    """Decodes are attended together; a sequence must not reach another's blocks."""
    for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
        await language.step([sequence(name, blocks)])
    decodes = [
        sequence(name, blocks, token_ids=[65], start=len(PROMPT))
        for name, blocks in (("a", [1, 2]), ("b", [3, 4]))
    ]
    expected = (await language.step(decodes)).outcomes[0]
    language.pool.tensor[3] = torch.nan
    outcomes = (await language.step(decodes)).outcomes
    assert outcomes[0] == expected and isinstance(expected, TokenLogprobs)
    assert isinstance(outcomes[1], StepFailure)
    language.pool.tensor[3] = 0


async def test_a_text_model_refuses_rows(driver: Callable[[str], Driver]) -> None:
    language = driver("llama").language
    assert language.row_contract is None
    span = RowSpan(0, 0, 1, [memoryview(bytes(4))])
    (outcome,) = (await language.step([sequence("a", [1, 2], spans=[span])])).outcomes
    assert isinstance(outcome, StepFailure) and "no images" in outcome.reason


async def test_seeded_text_is_the_same_in_any_batch(driver: Callable[[str], Driver]) -> None:
    """Same seed, same text: alone, among neighbours, and resumed behind the tokens emitted."""
    serving = driver("qwen3")
    prompt = [{"role": "user", "content": "tell me"}]
    knobs = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12, "repetition_penalty": 1.1}
    alone = await serving.request("a", prompt, seed=5, **knobs)
    (text,) = await serving.run([alone])
    crowd = [await serving.request(str(i), prompt, seed=i, **knobs) for i in range(8)]
    texts = await serving.run(crowd, chunk=7)
    assert texts[5] == text
    for emitted in (1, 5, 11):
        resumed = sequence(
            "r",
            alone.blocks,
            token_ids=alone.token_ids + text[:emitted],
            sample=alone.sampling,
            output_index=emitted,
            prompt_ids=alone.token_ids,
            output_ids=text[:emitted],
        )
        (outcome,) = (await serving.language.step([resumed])).outcomes
        assert isinstance(outcome, TokenLogprobs) and outcome.token_id == text[emitted]
    serving.release([alone, *crowd])
    assert len({tuple(t) for t in texts}) > 4, "different seeds, different texts"
