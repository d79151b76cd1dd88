"""What clients send besides, in each API: hints that change nothing, and what all four take."""

from __future__ import annotations

from typing import Any

import pytest

from epd.api.asked.reasoning import Place
from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat
from epd.api.responses.request import read_response
from epd.config import Limits
from epd.frontend import Generation
from tests.api.asked.test_reasoning import PARTS, SCRIPT
from tests.api.fakes import FakeFrontend, FakePreparer, serving
from tests.api.test_server import chunks_of, client_of
from tests.api.wire import exchange, request

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "now", "input_schema": {"type": "object"}}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 9},
    PLAIN: {"prompt": "hi", "max_tokens": 9},
    RESPONSES: {"input": "hi", "max_output_tokens": 9},
    MESSAGES: {"messages": HI, "max_tokens": 9},
}
KEEP = {"type": "clear_thinking_20251015", "keep": "all"}
HINTS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"use_beam_search": False},
        {"return_tokens_as_token_ids": True},  # there are no log-probabilities
        {"reasoning_effort": "high"},
        {"tools": [], "tool_choice": "none"},
    ],
    PLAIN: [{"use_beam_search": False}, {"return_tokens_as_token_ids": True}],
    RESPONSES: [
        {"truncation": "auto"},
        {"tool_choice": "auto"},
        {"tool_choice": "auto", "tools": []},
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"context_management": []},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    MESSAGES: [
        {"context_management": {"edits": [KEEP]}},
        {"context_management": {"edits": []}},
        {"output_config": {"effort": "max"}},
        {"thinking": {"type": "adaptive"}},
        {"tools": [{**TOOL, "defer_loading": False, "input_examples": [{}], "strict": True}]},
        {"service_tier": "auto", "metadata": {"user_id": "u"}},
        {"output_format": None, "cache_control": {"type": "ephemeral"}},
    ],
}
SHARED: list[dict[str, Any]] = [
    {"include_reasoning": True},
    {"prompt_logprobs": None, "logprob_token_ids": None, "return_token_ids": None},
]
CASES = [(path, hint) for path in BODIES for hint in [{}, *HINTS[path], *SHARED]]


async def generations(*asked: tuple[str, dict[str, Any], dict[str, str]]) -> list[Generation]:
    """What is generated for these requests, apart from the seed."""
    async with serving() as (server, frontend, _):
        for path, body, headers in asked:
            raw = request(BODIES[path] | body, path=path, **headers)
            status, _, sent = await exchange(server, raw)
            assert status == 200, (path, body, sent)
    return frontend.generations


async def test_hints_change_nothing() -> None:
    found = await generations(*((path, hint, {}) for path, hint in CASES))
    plain = {path: one for (path, hint), one in zip(CASES, found, strict=True) if hint == {}}
    for (path, hint), one in zip(CASES, found, strict=True):
        assert one.token_ids == plain[path].token_ids, hint
        assert one.sampling.seedless() == plain[path].sampling.seedless(), hint


async def test_a_salt_is_a_scope_inside_its_key_s_in_each_api() -> None:
    asked = [
        (path, {"cache_salt": salt} if salt else {}, {"authorization": f"Bearer {key}"})
        for path in BODIES
        for salt in ("", "one", "other")
        for key in ("alice", "bob")
    ]
    scopes = [one.scope for one in await generations(*asked)]
    assert len(set(scopes)) == 6 and scopes[:6] == scopes[6:12] == scopes[12:18] == scopes[18:]


async def test_template_flags_in_responses() -> None:
    body = {"input": "hi", "chat_template_kwargs": {"enable_thinking": False}}
    asked = read_response(body, FakePreparer(), Limits())
    assert asked.template_flags.variables == {"enable_thinking": False}


async def test_usage_is_in_the_first_chunk_too() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_of() as (client, _, _):
        chunks = await chunks_of(client, stream_options=options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[0].usage.prompt_tokens, chunks[0].usage.completion_tokens) == (2, 5)
    assert all(chunk.usage.prompt_tokens == 2 for chunk in chunks)


# --- reasoning that its client does not want ------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_reasoning_may_be_left_out(path: str, stream: bool) -> None:
    """It is counted all the same."""
    sent = {}
    for include in (True, False):
        async with serving(FakeFrontend(SCRIPT)) as (server, _, preparer):
            preparer.reasoning = Place.AHEAD
            body = {**BODIES[path], "include_reasoning": include, "stream": stream}
            if path == CHAT and stream:
                body["stream_options"] = {"include_usage": True}
            status, _, answer = await exchange(server, request(body, path=path))
            assert status == 200, answer
            sent[include] = answer.decode()
    assert "hm" in sent[True] and "hm" not in sent[False] and "think" not in sent[False]
    assert "reasoning_tokens" not in sent[False] and "Bern" in sent[False]
    count = f'"{"completion" if path == CHAT else "output"}_tokens":{sum(map(len, PARTS))}'
    assert all(count in text for text in sent.values())


def test_reasoning_that_is_text_cannot_be_left_out() -> None:
    model = FakePreparer()
    model.reasoning_parser = ""
    assert read_chat({"messages": HI, "include_reasoning": True}, model, Limits()).include_reasoning
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": HI, "include_reasoning": False}, model, Limits())
    assert (caught.value.status, caught.value.param) == (400, "include_reasoning")
    assert "--reasoning-parser" in caught.value.message
    with pytest.raises(ApiError, match="without logprobs") as caught:
        body = {"messages": HI, "include_reasoning": False, "logprobs": True}
        read_chat(body, FakePreparer(), Limits())
    assert caught.value.param == "include_reasoning"
