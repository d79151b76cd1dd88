"""Latent attention, beyond what the tests of all families show of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.factory import build_executor, build_language
from epd.engine.kernels import kernels_for
from epd.engine.kernels.torch_latent import Expanded
from epd.engine.language.forward import FEW_TOKENS, FusedForward
from epd.families.kimi import latent_attention
from tests.engine.conftest import CONFIG, chat
from tests.engine.driver import Driver
from tests.engine.language.test_graphs import Again
from tests.engine.language.test_speculation import oracle
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import make_model

SPECIFIED = kernels_for("cpu")

PROMPTS = (chat("a text that fills more than one block"), chat("hello"), chat("2 + 2?", "4", "3?"))


async def test_chunks_and_heads_take_turns_over_long_histories(
    driver: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is expanded at once does not change what is attended to."""
    serving = driver("kimi_k25")
    requests = [await serving.request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    await serving.step(requests, 7)
    steps = [request.next_step(4096) for request in requests]
    assert all(len(step.token_ids) > FEW_TOKENS for step in steps), "fewer are decodes"
    whole = serving.language.logits(steps)
    monkeypatch.setattr(latent_attention, "EXPANDED_NBYTES", 1)
    for rows in (1 << 20, 1):
        monkeypatch.setattr(latent_attention, "ROWS_NBYTES", rows)
        in_turns = serving.language.logits(steps)
        torch.testing.assert_close(in_turns, whole, atol=1e-5, rtol=0)
    serving.release(requests)


async def test_decodes_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense stack, whose keys turn in halves, in a pool full of NaN, which no kernel of prompts
    is given, since one that sums tiles would read it."""
    attend = SPECIFIED.attend_expanded

    def told(query: Any, turned: Any, expanded: Expanded, *others: Any) -> None:
        assert expanded.rows.isfinite().all() and expanded.numbers.isfinite().all()
        attend(query, turned, expanded, *others)

    monkeypatch.setattr(SPECIFIED, "attend_expanded", told)
    text = {"first_k_dense_replace": 9, "rope_interleave": False}
    directory = make_model("kimi_k25", tmp_path, text)
    language, again = build_language(directory, CONFIG, build_executor(CONFIG)), Again()
    forward = language.forward
    assert isinstance(forward, FusedForward)
    forward.capture(again, max_running=4, max_prompt_tokens=256)
    assert forward.prompt_graphs is None, "the host knows what is expanded"
    language.pool.tensor.fill_(torch.nan)
    serving = Driver(directory, None, language)
    requests = [
        await serving.request(str(i), prompt, max_tokens=6) for i, prompt in enumerate(PROMPTS)
    ]
    answers = await serving.run(requests, 16)
    assert answers == [reference_generate(directory, prompt, [], 6) for prompt in PROMPTS]
    assert (before := again.replays) >= 4
    requests = [
        await serving.request(str(i), prompt, max_tokens=6) for i, prompt in enumerate(PROMPTS)
    ]
    for request, answer in list(zip(requests, answers, strict=True))[::2]:
        request.draft = oracle(answer, lambda place: place % 3 == 0)
    assert await serving.run(requests, 4096) == answers, "drafts are as many decodes"
    assert again.replays > before
