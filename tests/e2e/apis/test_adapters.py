"""Adapters between real processes: each answer is that of its merged model, from cached KV too, and
is the same whether its adapter was there at the start or came later."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import post, post_all
from tests.e2e.goldens import sent
from tests.e2e.server import serving
from tests.engine.adapters import LAYERS, make_adapter, merge
from tests.engine.conftest import chat, drawn_image
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import cached_model

pytestmark = pytest.mark.timeout(400)
TEXTS = ("a prompt of more than one block of KV, for each", "and another prompt, as long as it")
NEW_TOKENS = 12
TOWER = r"model\.visual\.(blocks|merger)\..+"


@pytest.mark.long
@pytest.mark.parametrize("topology", ["1epd", "1e1p1d", "1e1pd", "1e1p:tp2,1d"])
async def test_no_answer_crosses_adapters(topology: str, tmp_path: Path) -> None:
    """The last one changes the tower alone."""
    model = cached_model("qwen2_5_vl")
    both = f"{LAYERS}\\w+_proj|{TOWER}"
    places = {
        name: make_adapter(tmp_path / name, model, seed, targets)
        for seed, (name, targets) in enumerate(
            {"pirate": both, "poet": both, "seer": TOWER}.items()
        )
    }
    merged = {name: merge(tmp_path / f"{name}-in", model, at) for name, at in places.items()}
    merged["tiny"] = model
    prompts = [(chat(text), []) for text in TEXTS]
    prompts += [(chat((1, "what is it?")), [drawn_image(1, 64, 64)])]
    golden = {
        (name, at): reference_generate(place, *prompt, NEW_TOKENS)
        for name, place in merged.items()
        for at, prompt in enumerate(prompts)
    }
    assert golden.pop(("seer", 0)) == golden["tiny", 0]
    assert golden.pop(("seer", 1)) == golden["tiny", 1]
    assert len({tuple(ids) for ids in golden.values()}) == len(golden)
    modules = [f"{name}={place}" for name, place in places.items()]
    flags = ("--enable-lora", "--lora-modules", *modules)
    with serving(topology, *flags, model=model) as server:
        for _ in range(2):  # then with the KV of each, which is cached
            bodies = [body(name, sent(*prompts[at])) for name, at in golden]
            replies = await post_all(server.base_url, bodies)
            said = [reply.body["choices"][0]["token_ids"] for reply in replies]
            assert said == list(golden.values())
            assert [reply.body["model"] for reply in replies] == [name for name, _ in golden]
        cached = [r.body["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
        assert min(cached) >= 16


def body(name: str, messages: Any) -> dict[str, Any]:
    return {
        "model": name,
        "messages": messages,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    "topology", ["1p1d", pytest.param("1p:tp2,1d:tp2", marks=pytest.mark.long)]
)
async def test_an_adapter_comes_and_goes(topology: str, tmp_path: Path) -> None:
    """It answers as from the start, and as merged into the model, when its files come back under
    another name, again and again; nobody may name it in between."""
    model = cached_model("llama")
    place = make_adapter(tmp_path / "poet", model, 1, LAYERS + r"\w+_proj")
    (tmp_path / "broken").mkdir()
    flags = ("--enable-lora", "--max-loras", "1", "--lora-modules", f"first={place}")
    with serving(topology, *flags, "--lora-runtime-dir", str(tmp_path), model=model) as server:
        async with aiohttp.ClientSession() as session:

            async def ask(name: str) -> Any:
                reply = await post(session, server.base_url, body(name, chat(TEXTS[0])))
                return reply.body["choices"][0]["token_ids"] if reply.status == 200 else reply

            async def change(verb: str, **body: str) -> tuple[int, Any]:
                path = f"/v1/{verb}_lora_adapter"
                reply = await post(session, server.base_url, body, path)
                return reply.status, reply.body

            from_start = await ask("first")
            assert from_start != await ask(model.name)
            merged = merge(tmp_path / "merged", model, place)
            assert from_start == reference_generate(merged, chat(TEXTS[0]), [], NEW_TOKENS)
            full = await change("load", lora_name="second", lora_path="poet")
            assert full[0] == 400 and "--max-loras" in full[1]["error"]["message"]
            assert (await change("unload", lora_name="first"))[0] == 200
            assert (await ask("first")).status == 404
            broken = await change("load", lora_name="second", lora_path="broken")
            assert broken[0] == 400 and "adapter_config.json" in broken[1]["error"]["message"]
            for _ in range(2):
                told = await change("load", lora_name="second", lora_path="poet")
                assert told == (200, "Success: LoRA adapter 'second' added successfully.")
                assert await ask("second") == from_start
                assert (await change("unload", lora_name="second"))[0] == 200
                assert (await ask("second")).status == 404
            assert (await change("unload", lora_name="second"))[0] == 404


@pytest.mark.long
async def test_one_that_was_loaded_outlives_its_gateway(tmp_path: Path) -> None:
    """Killed, and started anew by its supervisor: the instances bring their list."""
    model = cached_model("llama")
    make_adapter(tmp_path / "poet", model, 1, LAYERS + r"\w+_proj")
    flags = ("--enable-lora", "--lora-runtime-dir", str(tmp_path))
    with serving("1p1d", *flags, model=model) as server:
        load, asked = {"lora_name": "poet", "lora_path": "poet"}, body("poet", chat(TEXTS[0]))
        async with aiohttp.ClientSession() as session:
            told = await post(session, server.base_url, load, "/v1/load_lora_adapter")
            assert told.status == 200
            before = await post(session, server.base_url, asked)
        (gateway,) = [p for p in server.processes() if "epd.runtime.child" in p.cmdline()]
        gateway.kill()
        async with aiohttp.ClientSession() as session, asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    again = await post(session, server.base_url, asked)
                    if again.status == 200:
                        break
                await asyncio.sleep(0.2)
        choices = (reply.body["choices"][0]["token_ids"] for reply in (before, again))
        assert len(set(map(tuple, choices))) == 1
