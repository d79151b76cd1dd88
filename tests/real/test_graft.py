"""SmolLM2 with eyes: whole sentences about painted pictures, between real processes and as
transformers generates them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.client import png, post_all, question
from tests.e2e.server import serving
from tests.engine.conftest import chat
from tests.engine.reference import reference_inputs, reference_model
from tests.real.checkpoint import Unavailable
from tests.real.test_answers import PATIENT, SHORT
from training.graft.checkpoint import make
from training.graft.evaluate import KINDS, cases

RECORD = Path("docs/bench/graft.json")
TASKS, COUNT = (("total", "clock"), 1) if SHORT else (tuple(KINDS)[:5], 4)
MOST_TOKENS = 32


@pytest.fixture(scope="module")
def grafted() -> Path:
    try:
        return make()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.timeout(1500)
async def test_answers_about_pictures_equal_generate(grafted: Path) -> None:
    asked = [case for task in TASKS for case in cases(task, COUNT)]
    told = {"max_tokens": MOST_TOKENS, "return_token_ids": True}
    bodies = [question(case.question, png(case.image), **told) for case in asked]
    with serving("1e1p1d", model=grafted, **PATIENT) as server:
        replies = await post_all(server.base_url, bodies)
    for case, reply in zip(asked, replies, strict=True):
        inputs = reference_inputs(grafted, chat((1, case.question)), [case.image])
        prompt = inputs["input_ids"]
        with torch.inference_mode():
            output = reference_model(grafted).generate(
                **inputs,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
            )
        said = output[0, prompt.shape[1] :].tolist()
        assert reply.body["prompt_token_ids"] == prompt[0].tolist()
        assert reply.body["choices"][0]["token_ids"] == said, case
    right = sum(case.answer == reply.text for case, reply in zip(asked, replies, strict=True))
    found = json.loads(RECORD.read_text())["accuracy"]
    expected = sum(found[task] for task in TASKS) / len(TASKS)
    print(f"{right} of {len(asked)} right; {expected:.0%} of {RECORD}")
    assert right >= (expected - 0.2) * len(asked)
