"""Responses, Messages and what other servers tell besides, against real processes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from epd.cli.configure.model_check import BUNDLED_NAME
from epd.tiny import CHECKPOINT, SAMPLES
from epd.tiny.samples import read_index
from tests.e2e.client import data_url, image_part
from tests.e2e.server import Server
from tests.engine.reference import tokenizer

pytestmark = pytest.mark.timeout(300)
MODEL: Any = {"model": BUNDLED_NAME}
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"enum": ["CET"]}},
        "required": ["zone"], "additionalProperties": False}}  # fmt: skip


@pytest.fixture(scope="module")
def server(apart: Server) -> Server:
    return apart


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    url = server.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def sample() -> tuple[bytes, str, str]:
    entry = next(entry for entry in read_index() if entry.name == "receipt-total")
    return (SAMPLES / entry.images[0]).read_bytes(), entry.question, entry.answer


def test_an_image_is_read_through_responses(client: openai.OpenAI) -> None:
    image, question, expected = sample()
    content: Any = [
        {"type": "input_image", "image_url": data_url(image), "detail": "auto"},
        {"type": "input_text", "text": question},
    ]
    asked: Any = {**MODEL, "input": [{"role": "user", "content": content}], "temperature": 0}
    answer = client.responses.create(**asked)
    assert (answer.output_text, answer.status) == (expected, "completed")
    with client.responses.stream(**asked) as stream:
        said = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == final.output_text == expected
    assert final.usage is not None and answer.usage is not None
    assert final.usage.input_tokens == answer.usage.input_tokens


def test_an_image_is_read_through_messages(claude: anthropic.Anthropic) -> None:
    image, question, expected = sample()
    data = base64.b64encode(image).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    messages: Any = [{"role": "user", "content": content}]
    asked: Any = {**MODEL, "messages": messages, "max_tokens": 64}
    counted = claude.messages.count_tokens(**MODEL, messages=messages).input_tokens
    answer = claude.messages.create(**asked)
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.content[0].text, answer.stop_reason) == (expected, "end_turn")
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        usage = stream.get_final_message().usage
    for told in (answer.usage, usage):
        assert told.input_tokens + (told.cache_read_input_tokens or 0) == counted


def test_calls_are_enforced_in_both(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Through prefill and decode in processes of their own, whatever the model would say."""
    tool: Any = {"type": "function", **TOOL}
    response = client.responses.create(
        **MODEL, input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "now", '{"zone": "CET"}')
    offered: Any = {"name": "now", "input_schema": TOOL["parameters"]}
    message = claude.messages.create(
        **MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        tools=[offered],
        tool_choice={"type": "tool", "name": "now"},
    )
    (block,) = message.content
    assert (block.type, block.name, block.input) == ("tool_use", "now", {"zone": "CET"})
    assert message.stop_reason == "tool_use"


def test_what_the_prefix_cache_held_is_told(client: openai.OpenAI) -> None:
    """By prefill to the gateway, by way of decode."""
    text = "It was a long day at the harbour and the gauges had to be read twice. " * 8
    asked: Any = {**MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    told = []
    for _ in range(2):
        usage = client.chat.completions.create(**asked).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        told.append(usage.prompt_tokens_details.cached_tokens)
    *_, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    told.append(last.usage.prompt_tokens_details.cached_tokens)
    assert told[0] == 0
    assert told[1] == told[2] and told[1] > usage.prompt_tokens - 40


def test_ids_and_log_probabilities_by_id(client: openai.OpenAI) -> None:
    """Ids are those that the tokenizer knows; what is told of a token does not depend on why."""
    image, question, answer = sample()
    content = [image_part(data_url(image)), {"type": "text", "text": question}]
    said = {"messages": [{"role": "user", "content": content}]}
    ask: Any = {**MODEL, **said, "temperature": 0, "logprobs": True}
    told: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    reply = client.chat.completions.create(**ask, top_logprobs=5, extra_body=told).model_dump()
    ids = reply["choices"][0]["token_ids"]
    assert tokenizer(CHECKPOINT).decode(ids) == answer
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert reply["choices"][0]["matched_stop"] == ids[-1] == 258
    assert reply["choices"][0]["stop_reason"] is None
    likeliest = tops_of(reply)
    named = sorted(set().union(*likeliest))
    assert len(named) <= 128
    by_id = client.chat.completions.create(**ask, extra_body={**told, "logprob_token_ids": named})
    for token, expected, found in zip(ids, likeliest, tops_of(by_id.model_dump()), strict=True):
        assert set(found) == {*named, token}
        assert {i: found[i] for i in expected} == pytest.approx(expected, abs=1e-5)


def tops_of(reply: dict[str, Any]) -> list[dict[int, float]]:
    """Of each place the log-probabilities that are told, by id."""
    return [
        {
            int(top["token"].removeprefix("token_id:")): top["logprob"]
            for top in place["top_logprobs"]
        }
        for place in reply["choices"][0]["logprobs"]["content"]
    ]
