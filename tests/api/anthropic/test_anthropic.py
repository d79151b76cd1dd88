"""/v1/messages as Anthropic's own client sees it: answers, streams, tools, images and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from epd.api.anthropic.request import read_message
from epd.api.asked.reasoning import Place
from epd.api.http.errors import ApiError
from epd.config import Limits
from epd.frontend import Leave, Refused
from tests.api.fakes import NUM_IMAGE_ROWS, FakeFrontend, FakePreparer, failed, said, serving
from tests.api.wire import exchange, request
from tests.patience import PATIENCE_S

HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Tells it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
PNG = {"type": "base64", "media_type": "image/png", "data": "AA"}


@asynccontextmanager
async def client_of(
    *scripts: Any, **limits: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, FakeFrontend, FakePreparer]]:
    async with serving(FakeFrontend(*scripts), **limits) as (server, frontend, preparer):
        url = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            yield client, frontend, preparer


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    return await client.messages.create(
        **{"model": "tiny", "max_tokens": 20, "messages": HI, **fields}
    )


# --- answers --------------------------------------------------------------------------------------


async def test_a_message():
    async with client_of([said("he")._replace(num_cached=1), said("llo", "stop")]) as (c, f, _):
        answer = await ask(c, extra_body={"temperature": 0.5, "top_k": 3, "seed": 7})
    assert answer.id == "msg_gw-1-0"
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "hello"}
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 1, 5)
    sampling = f.generations[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (20, 0.5, 3)
    assert sampling.seed == 7


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ([said("hello", "length")], {}, ("max_tokens", None)),
        ([said("x" * 198, "length")], {}, ("model_context_window_exceeded", None)),
        ([said("hello")], {"stop_sequences": ["x", "lo"]}, ("stop_sequence", "lo")),
        ([said(CALL), said("", "stop")], {"tools": TOOLS}, ("tool_use", None)),
    ],
)
async def test_why_it_ended(script: Any, fields: Any, expected: Any):
    """The same whole and streamed."""
    async with client_of(script) as (client, _, _):
        answer = await ask(client, **fields)
        async with client.messages.stream(
            model="tiny", max_tokens=20, messages=HI, **fields
        ) as stream:
            streamed = await stream.get_final_message()
    assert (answer.stop_reason, answer.stop_sequence) == expected
    assert (streamed.stop_reason, streamed.stop_sequence) == expected


async def test_what_agents_send_besides_changes_nothing():
    """And more tokens than the context has are as many as it has."""
    hints = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "tools": [{**TOOLS[0], "input_examples": [{"city": "Bern"}], "defer_loading": False}],
        "max_tokens": 32_000,
    }
    async with client_of([said("a", "stop")], [said("a", "stop")]) as (client, frontend, _):
        await ask(client, extra_body=hints)
        await ask(client, tools=TOOLS, max_tokens=198)
    hinted, plain = (generation.sampling for generation in frontend.generations)
    assert hinted.max_tokens == plain.max_tokens == 198


def test_the_older_name_of_a_format():
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    body = {"max_tokens": 9, "messages": HI}
    older = read_message(body | {"output_format": form}, FakePreparer(), Limits())
    newer = read_message(body | {"output_config": {"format": form}}, FakePreparer(), Limits())
    assert older.constraint == newer.constraint is not None


async def test_a_conversation_with_images_and_tools():
    """Results of tools are messages of their own; a result's image opens the next one."""
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": PNG},
                {"type": "image", "source": {"type": "url", "url": "https://x/1.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [
                        {"type": "text", "text": "sun"},
                        {"type": "image", "source": PNG},
                    ],
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "be brief"}]
    async with client_of() as (client, frontend, preparer):
        preparer.max_context = 400
        answer = await ask(client, messages=messages, system=system, tools=TOOLS)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    system_m, first, called, result, last = preparer.messages
    assert system_m == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    assert first["content"][1] == image
    assert first["content"][2]["image_url"]["url"] == "https://x/1.png"
    assert called["reasoning_content"] == "hm"
    assert called["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Bern"},
    }
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "sun", "t1")
    assert last["content"] == [image, {"type": "text", "text": "and now?"}]
    assert preparer.tools[0]["function"]["parameters"] == TOOLS[0]["input_schema"]
    assert len(frontend.generations[0].items) == 3
    assert answer.usage.input_tokens > 3 * NUM_IMAGE_ROWS


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, (), False),
        ({"type": "any"}, ("weather",), True),
        ({"type": "tool", "name": "weather"}, ("weather",), True),
        ({"type": "none"}, None, True),
    ],
)
async def test_tool_choice(choice: Any, forced: Any, parallel: bool):
    body = {"messages": HI, "max_tokens": 9, "tools": TOOLS, "tool_choice": choice}
    asked = read_message(body, FakePreparer(), Limits())
    if forced is None:
        assert asked.tool_use is None
    else:
        assert (asked.tool_use.forced, asked.tool_use.parallel) == (forced, parallel)


# --- streams --------------------------------------------------------------------------------------


async def test_events():
    """Names, order and contents on the wire; nothing behind the last."""
    script = [said("Hm. "), 0.05, said(CALL[:52]), 0.05, said(CALL[52:]), said("", "stop")]
    body = {"messages": HI, "max_tokens": 90, "stream": True, "tools": TOOLS}
    async with serving(FakeFrontend(script)) as (server, _, _):
        status, headers, sent = await exchange(server, request(body, path="/v1/messages"))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    named, events = [], []
    for block in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        named.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert named == [event["type"] for event in events]
    assert [name for i, name in enumerate(named) if i == 0 or name != named[i - 1]] == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] == 2
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1]
    assert starts[0]["content_block"] == {"type": "text", "text": ""}
    assert starts[1]["content_block"]["name"] == "weather"
    assert starts[1]["content_block"]["input"] == {}
    assert starts[1]["content_block"]["id"].startswith("toolu_")
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "text_delta", "text": "Hm. "}
    arguments = "".join(delta["partial_json"] for delta in deltas[1:])
    assert json.loads(arguments) == {"city": "Bern"} and len(deltas) > 2
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len("Hm. " + CALL)


async def test_reasoning_is_a_block_of_its_own():
    script = [said("<think>hm"), 0.05, said(" so</think>"), 0.05, said("Bern", "stop")]
    async with client_of(script) as (client, _, preparer):
        preparer.reasoning = Place.AHEAD
        answer = await ask(client)
        async with client.messages.stream(model="tiny", max_tokens=20, messages=HI) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    for message in (answer, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("hm so", "Bern")
    assert kinds.count("thinking") == 2
    off = {"messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}}
    assert read_message(off, FakePreparer(), Limits()).template_flags.effort == "none"


async def test_the_client_s_own_stream():
    calls = [said("See: "), said(CALL), said(f"\n{CALL}"), said("", "stop")]
    async with (
        client_of(calls) as (client, _, _),
        client.messages.stream(model="tiny", max_tokens=190, messages=HI, tools=TOOLS) as stream,
    ):
        text = "".join([text async for text in stream.text_stream])
        message = await stream.get_final_message()
    assert text == "See: "
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[1].input == {"city": "Bern"}
    assert message.content[1].id != message.content[2].id
    assert message.usage.output_tokens == len("See: " + CALL + "\n" + CALL)


async def test_a_stream_that_fails():
    async with client_of([said("he"), 0.05, failed("lost", 503, "gone")]) as (client, _, _):
        with pytest.raises(anthropic.APIStatusError, match="gone") as caught:
            async for _ in await ask(client, stream=True):
                pass
    assert caught.value.body["error"]["type"] == "overloaded_error"


# --- refusals -------------------------------------------------------------------------------------


async def test_errors_have_their_form_and_class():
    frontend = FakeFrontend()
    frontend.refused[0] = Refused(429, "full")
    async with serving(frontend) as (server, _, _):
        url = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            with pytest.raises(anthropic.RateLimitError) as full:
                await ask(client)
            with pytest.raises(anthropic.NotFoundError) as other:
                await ask(client, model="claude")
            with pytest.raises(anthropic.BadRequestError) as bad:
                await ask(client, extra_headers={"X-Request-Id": "mine"}, extra_body={"top_p": 3})
    assert full.value.response.headers["retry-after"] == "1"
    assert full.value.body["error"]["type"] == "rate_limit_error"
    assert other.value.body["error"]["type"] == "not_found_error"
    assert bad.value.body["type"] == "error"
    assert bad.value.body["request_id"] == "mine"
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["param"] == "top_p"
    async with serving() as (server, _, _):
        status, _, body = await exchange(server, request(b"{", path="/v1/messages"))
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        get = request(method="GET", path="/v1/messages")
        status, headers, body = await exchange(server, get)
        assert (status, headers["allow"]) == (405, "POST")
        assert json.loads(body)["type"] == "error"


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages[1]",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (user({"type": "document"}), "messages[1].content[0].type"),
        (user({"type": "text"}), "messages[1].content[0].text"),
        (user({"type": "text", "text": "x", "size": 1}), "messages[1].content[0].size"),
        (user({"type": "image", "source": 1}), "messages[1].content[0].source"),
        (
            user({"type": "tool_use", "id": "", "name": "a", "input": {}}),
            "messages[1].content[0].type",
        ),
        (
            user({"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "1"}),
            "messages[1].content[1]",
        ),
        ({"system": [{"type": "image", "source": PNG}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"min_tokens": 10}, "min_tokens"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str):
    with pytest.raises(ApiError) as caught:
        read_message({"max_tokens": 9, "messages": HI, **body}, FakePreparer(), Limits())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message


async def test_an_image_that_is_refused_later_has_its_own_name():
    """The prompt's part of the work knows chat's names only."""
    async with client_of() as (client, frontend, _):
        source: Any = {"type": "url", "url": "file:///etc/passwd"}
        messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, messages=messages)
    assert caught.value.body["error"]["param"] == "messages[0].content[0].source"
    assert [why for why, _ in frontend.streams[0].reasons] == [Leave.REFUSED]
