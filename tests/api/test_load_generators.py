"""What load generators send, as bytes on the wire, and what they read of the answer.

The bodies are those of aiperf 0.13, guidellm 0.8 and `vllm bench serve`: an answer of theirs that
is refused, or a field that is missing, makes a benchmark impossible.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.api.fakes import EOS, NUM_IMAGE_ROWS, FakeFrontend, said, serving

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}
USAGE = {"include_usage": True}
VLLM_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}],
    "max_completion_tokens": 5,
    "stream": True,
    "stream_options": USAGE,
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM_COMPLETION = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "repetition_penalty": 1.0,
    "max_tokens": 5,
    "logprobs": None,
    "stream": True,
    "stream_options": USAGE,
    "ignore_eos": True,
}
AIPERF = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}],
    "model": "tiny",
    "stream": True,
    "max_completion_tokens": 5,
    "stream_options": USAGE,
}
GUIDELLM = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 5,
    "stop": None,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}],
}
SCRIPT = [said("ab"), 0.02, said("c"), 0.02, said("de", "length")]


async def events_of(frontend: FakeFrontend, path: str, body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, `[DONE]` checked and taken off."""
    async with (
        serving(frontend) as (server, _, _),
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.post(path, json=body, headers={"Authorization": "Bearer x"}) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("body", [VLLM_CHAT, AIPERF, GUIDELLM])
async def test_chat(body: dict[str, Any]) -> None:
    frontend = FakeFrontend(SCRIPT)
    *chunks, last = await events_of(frontend, "/v1/chat/completions", body)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "abcde"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2 + NUM_IMAGE_ROWS,
        "completion_tokens": 5,
        "total_tokens": 7 + NUM_IMAGE_ROWS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    sampling = frontend.generations[0].sampling
    assert sampling.max_tokens == 5
    assert sampling.stop_token_ids == (() if "ignore_eos" in body else (EOS,))


async def test_completion() -> None:
    frontend = FakeFrontend(SCRIPT)
    *chunks, last = await events_of(frontend, "/v1/completions", VLLM_COMPLETION)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcde"
    assert last["usage"]["completion_tokens"] == 5
    assert frontend.generations[0].token_ids == (1, 2, 3)


async def test_usage_in_every_chunk() -> None:
    """guidellm reads the tokens so far of each chunk; with several choices, of its own."""
    frontend = FakeFrontend(SCRIPT, [said("x", "length")])
    *chunks, last = await events_of(frontend, "/v1/chat/completions", {**GUIDELLM, "n": 2})
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        if chunk["choices"][0]["delta"].get("content"):
            assert chunk["usage"]["prompt_tokens"] == 2 + NUM_IMAGE_ROWS
            told[chunk["choices"][0]["index"]].append(chunk["usage"]["completion_tokens"])
    assert told == {0: [2, 3, 5], 1: [1]}
    assert last["usage"]["completion_tokens"] == 6


async def test_every_token_is_news() -> None:
    """A model with random weights makes tokens without text; a client still times their arrival."""
    frontend = FakeFrontend([said("a"), 0.02, said("EN"), 0.02, said("x", "length")])
    body = {**VLLM_CHAT, "stop": "END"}
    chunks = await events_of(frontend, "/v1/chat/completions", body)
    texts = [c["choices"][0]["delta"]["content"] for c in chunks[:-1]]
    assert texts == ["", "a", "", "ENx"]


async def test_a_stop_token_is_counted_and_has_no_text() -> None:
    frontend = FakeFrontend([said("ab"), said("c|", "stop")])
    body = {**VLLM_CHAT, "stop_token_ids": [ord("|")]}
    *chunks, last = await events_of(frontend, "/v1/chat/completions", body)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "abc"
    assert last["usage"]["completion_tokens"] == 4
    assert frontend.generations[0].sampling.stop_token_ids == (ord("|"),)
    frontend = FakeFrontend([said("ab"), said("c|", "length")])
    chunks = await events_of(frontend, "/v1/chat/completions", body)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == "abc|"
