"""Drafts on a GPU: answers are those of transformers, and drafts those of its modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from epd.config import SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.forward import FusedForward
from tests.engine.conftest import chat, drawn_image
from tests.engine.draft_models import COUNT, DRAFTING, Drafting, make_drafting, reference_drafts
from tests.engine.driver import Driver
from tests.engine.language.test_eagle import compare
from tests.engine.language.test_speculation import every, none, oracle, third
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import EMBEDDED

NEW_TOKENS = 24
CASES = [(chat("hello there"), []), (chat((1, "what?")), [drawn_image(1, 64, 64)])]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("count", [1, 4, 20])
async def test_many_sequences_draft(count: int, graphs: bool, cuda: str, tmp_path: Path) -> None:
    """More than steps with prompts have captured chunks, too."""
    directory = make_drafting("qwen3_5", tmp_path, agreeing=True)
    config = structs.replace(DRAFTING, device=cuda, cuda_graphs=graphs, kv_nbytes=64 << 20)
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    language = build_language(directory, config, executor, 96)
    serving = Drafting(directory, vision, language)
    prompts = [chat(f"question {i}, and {i * 'more ' + 'so on'}") for i in range(count)]
    golden = [reference_generate(directory, prompt, [], NEW_TOKENS) for prompt in prompts]
    requests = [
        await serving.request(str(i), prompt, max_tokens=NEW_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    assert await serving.run(requests, 4096) == golden
    assert sum(request.num_steps for request in requests) < 0.8 * sum(map(len, golden))
    assert (language.forward.graphs is not None) is graphs  # type: ignore[attr-defined]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("family", "agreeing"), [("qwen3_5", True), ("qwen3_5_moe", False), ("kimi_k25", True)]
)
async def test_the_models_layer_drafts(
    family: str, agreeing: bool, graphs: bool, cuda: str, tmp_path: Path
) -> None:
    directory = make_drafting(family, tmp_path, agreeing=agreeing)
    config = structs.replace(DRAFTING, device=cuda, cuda_graphs=graphs, kv_nbytes=32 << 20)
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    serving = Drafting(directory, vision, build_language(directory, config, executor, 16))
    golden = [reference_generate(directory, *case, NEW_TOKENS) for case in CASES]
    requests = [
        await serving.request(str(i), *case, max_tokens=NEW_TOKENS) for i, case in enumerate(CASES)
    ]
    compared = 0
    while not all(request.finished for request in requests):
        await serving.step(requests, 16)
        first, drafts = requests[0], serving.proposed.get("0")
        if first.output and drafts and not first.finished:
            text = [*first.token_ids, *first.output_ids]
            assert drafts == reference_drafts(directory, text, COUNT)
            compared += 1
    assert [request.output_ids for request in requests] == golden
    assert compared >= 3


@pytest.mark.parametrize("graphs", [True, False])
async def test_an_eagle_head_drafts(graphs: bool, cuda: str, tmp_path: Path) -> None:
    """What it reads of the model is there behind captured steps, too."""
    await compare(EMBEDDED, tmp_path, device=cuda, cuda_graphs=graphs)


@pytest.mark.parametrize("graphs", [True, False])
async def test_hybrids_take_drafts(graphs: bool, cuda: str, tmp_path: Path) -> None:
    """Right, wrong, and both, beside a sequence without."""
    directory = make_drafting("qwen3_5", tmp_path, agreeing=False)
    config = structs.replace(
        DRAFTING, device=cuda, cuda_graphs=graphs, kv_nbytes=32 << 20,
        speculative=SpeculativeConfig("ngram", 4, 1, 3),
    )  # fmt: skip
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    serving = Driver(directory, vision, build_language(directory, config, executor, 16))
    assert isinstance(serving.language.forward, FusedForward)
    golden = [reference_generate(directory, *case, NEW_TOKENS) for case in CASES]
    for wrong in (none, every, third):
        requests = [
            await serving.request(str(i), *case, max_tokens=NEW_TOKENS)
            for i, case in enumerate([*CASES, CASES[0]])
        ]
        for request, answer in zip(requests[:2], golden, strict=True):
            request.draft = oracle(answer, wrong)
        assert await serving.run(requests, 16) == [*golden, golden[0]], wrong
        serving.release(requests)
