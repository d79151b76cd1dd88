"""Drafts by the checkpoint's own layer: they are what transformers' modules draft, and never change
an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.engine.base import StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.model_files.checkpoint import ModelError
from tests.engine.conftest import chat, drawn_image
from tests.engine.draft_models import (
    COUNT,
    DRAFTING,
    Drafting,
    make_drafting,
    reference_drafts,
    same_with_and_without,
)
from tests.engine.language.test_graphs import Again
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import EMBEDDED, make_model

CONFIG = DRAFTING


@pytest.fixture(scope="module")
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    family, agreeing = request.param
    directory = make_drafting(family, tmp_path_factory.mktemp(family), agreeing=agreeing)
    executor = build_executor(CONFIG)
    sees = family != "deepseek_v3"
    vision = build_vision(directory, CONFIG, executor) if sees else None
    driver = Drafting(directory, vision, build_language(directory, CONFIG, executor))
    driver.agrees = agreeing
    return driver


FORMS = [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False)]
FORMS += [("deepseek_v3", False), ("kimi_k25", True)]
every_form = pytest.mark.parametrize("serving", FORMS, indirect=True)


@every_form
async def test_drafts_are_those_of_transformers(serving: Drafting) -> None:
    """Behind each step: of chunks, of a token alone, and behind drafts that hold or do not."""
    texts = ("hello there, and so on and so on", "another question")
    asked = [await serving.request(t, chat(t), max_tokens=14, stop_token_ids=()) for t in texts]
    compared = 0
    while not all(request.finished for request in asked):
        await serving.step(asked, 16)
        for request in asked:
            drafts = serving.proposed[request.name]
            if request.output and drafts:
                text = [*request.token_ids, *request.output_ids]
                assert drafts == reference_drafts(serving.model_dir, text, COUNT)
                compared += 1
    assert compared >= 6
    serving.release(asked)


@every_form
async def test_greedy_equals_generate(serving: Drafting) -> None:
    """Texts and images; where the layer knows the model, in fewer steps."""
    cases = [(chat("hello there"), []), (chat((1, "what?")), [drawn_image(1, 64, 64)])]
    cases = cases[: 2 if serving.vision is not None else 1]
    golden = [reference_generate(serving.model_dir, *case, 24) for case in cases]
    asked = [await serving.request(str(i), *case, max_tokens=24) for i, case in enumerate(cases)]
    answers = await serving.run(asked, 16)
    assert answers == golden
    steps = sum(r.num_steps - -(-len(r.token_ids) // 16) + 1 for r in asked)
    tokens = sum(map(len, answers))
    if serving.agrees:
        assert steps < 0.7 * tokens
    serving.release(asked)


@every_form
async def test_captured_steps_are_the_same(serving: Drafting) -> None:
    """Verified, replayed and drafted in captured steps of decodes, beside plain sequences."""
    forward, again = serving.language.forward, Again()
    forward.capture(again, max_running=16, max_prompt_tokens=0)  # type: ignore[attr-defined]
    texts = ("hello there", "another question", "and one more, which is longer")
    golden = [reference_generate(serving.model_dir, chat(t), [], 14) for t in texts]
    for count in (1, 3):
        asked = [await serving.request(t, chat(t), max_tokens=14) for t in texts[:count]]
        before = again.replays
        assert await serving.run(asked, 4096) == golden[:count]
        steps = max(request.num_steps for request in asked) - 1
        assert again.replays - before >= 2 * steps, "each of them, and what follows it"
        serving.release(asked)
    forward.graphs = serving.language.forward.draft_layer.graphs = None  # type: ignore[attr-defined]


@every_form
async def test_steps_that_leave_the_layer_out_write_zeros_in_place_of_its_rows(
    serving: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a former tenant left there; and what they say is the same."""
    language, wishing = serving.language, serving._wishing
    pool, num_layers = language.pool, language.kv_layout.num_layers
    golden = reference_generate(serving.model_dir, chat("hello there"), [], 14)
    asked = await serving.request("r", chat("hello there"), max_tokens=14)
    parts = pool._parts(num_layers - 1)
    for part in parts:
        part.numbers.fill_(9.0)

    def unfollowed(*asks: Any) -> StepSequence:
        return replace(wishing(*asks), is_followed=False, num_wanted=0)

    with monkeypatch.context() as patch:
        patch.setattr(serving, "_wishing", unfollowed)
        assert await serving.run([asked], 16) == [golden]
    assert not any(serving.made["r"])
    table = asked.blocks[language.kv_layout.num_state_blocks :]
    places = [(table[at // 16], at % 16) for at in range(asked.computed)]
    for part in parts:
        assert not any(part.numbers[block, slot].any() for block, slot in places)
        held = part.numbers.flatten(2).any(-1)
        assert held.sum() == held.numel() - len(places), "no other row was touched"
    serving.release([asked])


SAMPLED = {
    "drawn": {"temperature": 0.8, "seed": 7},
    "greedy with penalties": {"repetition_penalty": 1.2},
}


@pytest.mark.parametrize("what", SAMPLED)
@pytest.mark.parametrize("serving", [f for f in FORMS if f[1]], indirect=True)
async def test_any_sampling_says_what_it_says_without_drafts(what: str, serving: Drafting) -> None:
    wishes = SAMPLED[what] | {"max_tokens": 24, "stop_token_ids": ()}
    await same_with_and_without(serving, chat("hello"), **wishes)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    executor = build_executor(CONFIG)
    with pytest.raises(ModelError, match="has no layer for drafts; use the method ngram"):
        build_language(EMBEDDED, CONFIG, executor)
    with pytest.raises(ModelError, match=r"lacks mtp\.fc\.weight"):
        build_language(make_model("qwen3_5", tmp_path), CONFIG, executor)
