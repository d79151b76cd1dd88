"""/v1/responses as OpenAI's own client sees it: answers, events, tools, images and refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from epd.api.asked.reasoning import Place
from epd.api.http.errors import ApiError
from epd.api.responses.request import read_response
from epd.config import Limits
from tests.api.fakes import NUM_IMAGE_ROWS, FakePreparer, failed, said
from tests.api.test_server import client_of

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
CALLING = [said("Hm. "), 0.05, said(CALL[:52]), 0.05, said(CALL[52:]), said("", "stop")]
HELLO: Any = {"role": "user", "content": "hello"}
IMAGE = "data:image/png;base64,AA"


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(**{"model": "tiny", "input": "hi", **fields})


# --- answers --------------------------------------------------------------------------------------


async def test_a_response():
    script = [said("he")._replace(num_cached=1), said("llo", "stop")]
    async with client_of(script) as (client, frontend, preparer):
        answer = await ask(
            client,
            instructions="be brief",
            max_output_tokens=9,
            temperature=0.5,
            store=True,
            metadata={"a": "b"},
            extra_body={"seed": 3},
        )
    assert answer.id == "resp_gw-1-0"
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.output_text == "hello"
    assert (answer.output[0].type, answer.output[0].status) == ("message", "completed")
    assert preparer.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, 5, 15)
    assert usage.input_tokens_details.cached_tokens == 1
    sampling = frontend.generations[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 3)
    assert (answer.instructions, answer.max_output_tokens) == ("be brief", 9)
    assert (answer.temperature, answer.metadata) == (0.5, {"a": "b"})
    assert answer.store is False, "and the object does not say otherwise"


async def test_an_answer_that_was_cut_off():
    async with client_of([said("hello", "length")]) as (client, _, _):
        answer = await ask(client)
        *_, last = [event async for event in await ask(client, stream=True)]
    for told in (answer, last.response):
        assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (told.output[0].status, told.output_text) == ("incomplete", "hello")
    assert last.type == "response.incomplete"


async def test_log_probabilities():
    script = [said("hi", "stop", logprobs=True)]
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with client_of(script) as (client, _, _):
        answer = await ask(client, **wanted)
        events = [event async for event in await ask(client, stream=True, **wanted)]
    entries = answer.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob, len(entry.top_logprobs)) for entry in entries] == [
        ("h", -0.5, 2),
        ("i", -0.5, 2),
    ]
    (delta,) = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for entry in delta.logprobs] == ["h", "i"]
    assert events[-1].response.output[0].content[0].logprobs[0].bytes == [104]


async def test_tools_there_and_back():
    """The output of one answer is input of the next, as the client has it."""
    async with client_of(CALLING) as (client, _, preparer):
        answer = await ask(client, tools=TOOLS)
        text, call = answer.output
        assert text.content[0].text == "Hm. "
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments) == {"city": "Bern"}
        assert preparer.tools[0]["function"]["parameters"] == PARAMETERS
        result: Any = [
            {"type": "input_text", "text": "sun"},
            {"type": "input_image", "image_url": IMAGE},
        ]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        await ask(client, input=[{"role": "user", "content": "hi"}, *answer.output, output])
    asked, answered, told, more = preparer.messages
    assert asked == {"role": "user", "content": "hi"}
    assert answered["content"] == [{"type": "text", "text": "Hm. "}]
    assert answered["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert (told["role"], told["content"], told["tool_call_id"]) == ("tool", "sun", call.call_id)
    assert more["content"] == [{"type": "image_url", "image_url": {"url": IMAGE}}]


async def test_some_tools_may_be_called():
    other = {**TOOLS[0], "name": "other"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    body = {"input": "hi", "tools": [*TOOLS, other], "tool_choice": choice}
    asked = read_response(body, FakePreparer(), Limits())
    assert asked.tool_use is not None and asked.tool_use.forced == ("weather",)
    assert asked.echo["tool_choice"] == choice
    choice["tools"] = [{"type": "function", "name": "none"}]
    with pytest.raises(ApiError, match="not among the tools"):
        read_response(body, FakePreparer(), Limits())


async def test_images_and_what_was_thought():
    items: Any = [
        {"role": "developer", "content": "look"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "what"},
                {"type": "input_image", "image_url": IMAGE, "detail": "low"},
            ],
        },
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "a cat?"}],
        },
        {"type": "message", "role": "assistant", "content": "A cat."},
        {"type": "message", "role": "user", "content": "sure?"},
    ]
    async with client_of() as (client, frontend, preparer):
        answer = await ask(client, input=items)
    assert [message["role"] for message in preparer.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert preparer.messages[2]["reasoning_content"] == "a cat?"
    assert len(frontend.generations[0].items) == 1
    assert answer.usage.input_tokens > NUM_IMAGE_ROWS


async def test_how_much_reasoning_is_asked_for():
    asked = read_response({"input": "hi", "reasoning": {"effort": "low"}}, FakePreparer(), Limits())
    assert asked.template_flags.effort == "low" and asked.echo["reasoning"]["effort"] == "low"
    with pytest.raises(ApiError) as caught:
        read_response({"input": "hi", "reasoning": {"effort": "x"}}, FakePreparer(), Limits())
    assert caught.value.param == "reasoning.effort"


async def test_a_schema_for_the_text():
    form: Any = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}, "strict": True}
    body = {"input": "hi", "text": {"format": form, "verbosity": "low"}}
    asked = read_response(body, FakePreparer(), Limits())
    assert asked.constraint is not None and asked.constraint.value == {"type": "integer"}
    assert asked.echo["text"]["format"] == form
    form["schema"] = 3
    with pytest.raises(ApiError) as caught:
        read_response(body, FakePreparer(), Limits())
    assert caught.value.param == "text.format.schema"


# --- events ---------------------------------------------------------------------------------------


async def test_events():
    async with client_of(CALLING) as (client, _, _):
        events = [event async for event in await ask(client, stream=True, tools=TOOLS)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert kinds.count("function_call_arguments.delta") > 1
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.status) for event in added] == [
        (0, "in_progress"),
        (1, "in_progress"),
    ]
    assert added[0].item.content == [] and added[1].item.arguments == ""
    by_item: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            by_item[event.item_id] = by_item.get(event.item_id, "") + event.delta
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert by_item == {done[0].id: done[0].content[0].text, done[1].id: done[1].arguments}
    assert events[-1].response.output == done
    assert events[-1].response.usage.output_tokens == len("Hm. " + CALL)


async def test_reasoning_is_an_item_of_its_own():
    """And goes back as it came."""
    script = [said("<think>hm"), 0.05, said(" so</think>"), 0.05, said("Bern", "stop")]
    async with client_of(script) as (client, _, preparer):
        preparer.reasoning = Place.AHEAD
        answer = await ask(client)
        events = [event async for event in await ask(client, stream=True)]
        await ask(client, input=[{"role": "user", "content": "hi"}, *answer.output, HELLO])
    thought, message = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm so")
    assert (message.type, answer.output_text) == ("message", "Bern")
    assert answer.usage.output_tokens_details is None, "not counted"
    grown = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert [event.delta for event in grown] == ["hm", " so"]
    assert events[-1].response.output[0].content == thought.content
    assert preparer.messages[1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Bern"}],
        "reasoning_content": "hm so",
    }


async def test_the_client_s_own_stream():
    async with (
        client_of(CALLING) as (client, _, _),
        client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream,
    ):
        async for _ in stream:
            pass
        answer = await stream.get_final_response()
    assert answer.output_text == "Hm. "
    assert json.loads(answer.output[1].arguments) == {"city": "Bern"}


async def test_a_stream_that_fails():
    async with client_of([said("he"), 0.05, failed("lost", 503, "gone")]) as (client, _, _):
        *_, last = [event async for event in await ask(client, stream=True)]
        with pytest.raises(openai.InternalServerError, match="gone"):
            await ask(client, extra_body={"top_k": 2})
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "gone"
    assert last.response.output[0].status == "incomplete"


# --- refusals -------------------------------------------------------------------------------------


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        (part(type="input_file", file_id="x"), "input[0].content[0].type"),
        (part(type="input_image", file_id="x"), "input[0].content[0].file_id"),
        (part(type="input_image", image_url="x", detail="most"), "input[0].content[0].detail"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str):
    with pytest.raises(ApiError) as caught:
        read_response({"input": "hi", **body}, FakePreparer(), Limits())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message


async def test_what_is_refused_later_has_its_own_name():
    async with client_of() as (client, _, _):
        content: Any = [{"type": "input_image", "image_url": "file:///etc/passwd"}]
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, input=[{"role": "user", "content": content}])
        assert caught.value.param == "input[0].content[0]"
        with pytest.raises(openai.BadRequestError, match="context holds") as caught:
            await ask(client, max_output_tokens=500)
        assert caught.value.param == "input"
