"""Drafts change no answer where instances die: texts are those of a run without drafts.

A model without states and one with them, drafts from the text and by the model's own layer, each
in every topology, of which the instance that decodes is killed meanwhile: 200 answers and more.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Body, post_all
from tests.e2e.server import serving
from tests.e2e.streams import (
    PATIENT,
    all_have_said,
    ask_during,
    questions,
    tokens_of,
    wait_until_replaced,
)
from tests.engine.draft_models import make_drafting
from tests.engine.tiny_models import EMBEDDED

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

TOPOLOGIES = {"1epd": "epd0", "1e1p1d": "d0", "1e1pd:tp2": "pd0"}  # and who is killed
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FORMS = {
    "dense, n-grams": (False, NGRAM),
    "hybrid, n-grams": (True, NGRAM),
    "hybrid, its layer": (True, {"method": "mtp"}),
}
ANSWERS, NUM_TOKENS = 200, 48
EACH = -(-ANSWERS // (len(FORMS) * len(TOPOLOGIES)))


@dataclass(frozen=True)
class Asked:
    directory: Path
    drafts: dict[str, Any]
    bodies: list[Body]
    expected: list[list[bytes]]  # said without drafts


@pytest.fixture(scope="module", params=FORMS)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    has_states, drafts = FORMS[request.param]
    directory = EMBEDDED
    if has_states:
        directory = make_drafting("qwen3_5", tmp_path_factory.mktemp("hybrid"), agreeing=True)
    bodies = questions(70, EACH, side=60, num_tokens=NUM_TOKENS)
    with serving("1epd", model=directory, **PATIENT) as server:
        replies = asyncio.run(post_all(server.base_url, bodies))
    choices = [reply.body["choices"][0] for reply in replies]
    return Asked(directory, drafts, bodies, [tokens_of(choice) for choice in choices])


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_texts_are_those_without_drafts(topology: str, asked: Asked) -> None:
    name = TOPOLOGIES[topology]
    config = json.dumps(asked.drafts | {"num_speculative_tokens": 3})
    flags = "--speculative-config", config
    with serving(topology, *flags, model=asked.directory, **PATIENT) as server:
        entry = server.instances()[name]
        kill = lambda: os.kill(entry["pid"], signal.SIGKILL)  # noqa: E731
        replies = await ask_during(server, asked.bodies, kill, all_have_said)
        wait_until_replaced(server, name, entry["epoch"])
        again = await post_all(server.base_url, asked.bodies[:2])
        drafted = {k: v for k, v in server.metrics().items() if "num_draft_tokens" in k}
    assert len(replies) == len(asked.expected) == EACH
    assert any(reply.has_migrated for reply in replies)
    for number, (reply, expected) in enumerate(zip(replies, asked.expected, strict=True)):
        assert reply.is_done, reply.error
        assert reply.tokens == expected != [], number
    said = [tokens_of(reply.body["choices"][0]) for reply in again]
    assert said == asked.expected[:2]
    assert sum(drafted.values()) > 0, "nothing was drafted"
