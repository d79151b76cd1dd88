"""Adapters between real processes: each answer is that of its merged model, from cached KV too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import post_all
from tests.e2e.server import serving
from tests.engine.adapters import LAYERS, make_adapter, merge
from tests.engine.conftest import chat
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import cached_model

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
TEXTS = ("a prompt of more than one block of KV, for each", "and another prompt, as long as it")
NEW_TOKENS = 12


@pytest.mark.parametrize("topology", ["1e1p1d", "1e1pd", "1e1p:tp2,1d"])
async def test_no_answer_crosses_adapters(topology: str, tmp_path: Path) -> None:
    model = cached_model("qwen2_5_vl")
    places = {
        name: make_adapter(tmp_path / name, model, seed, LAYERS + r"\w+_proj")
        for seed, name in enumerate(("pirate", "poet"))
    }
    merged = {name: merge(tmp_path / f"{name}-in", model, at) for name, at in places.items()}
    merged["tiny"] = model
    golden = {
        (name, text): reference_generate(place, chat(text), (), NEW_TOKENS)
        for name, place in merged.items()
        for text in TEXTS
    }
    assert len({tuple(ids) for ids in golden.values()}) == len(golden)
    modules = [f"{name}={place}" for name, place in places.items()]
    flags = ("--enable-lora", "--lora-modules", *modules)
    with serving(topology, *flags, model=model) as server:
        for _ in range(2):  # then with the KV of each, which is cached
            replies = await post_all(server.base_url, [body(*asked) for asked in golden])
            said = [reply.body["choices"][0]["token_ids"] for reply in replies]
            assert said == list(golden.values())
            assert [reply.body["model"] for reply in replies] == [name for name, _ in golden]
        cached = [r.body["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
        assert min(cached) >= 16


def body(name: str, text: str) -> dict[str, Any]:
    return {
        "model": name,
        "messages": chat(text),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
