"""Tokens of a prompt, text of tokens: of the bundled model, as transformers has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from transformers import AutoTokenizer

from epd.api.prompts.prepare import Preparer
from epd.api.server import ApiServer
from epd.config import GatewayConfig
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakeFrontend, serving
from tests.api.prompts.test_prepare import part, png
from tests.api.wire import exchange, refused, request

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def tiny(frontend: FakeFrontend | None = None) -> AsyncIterator[ApiServer]:
    """The bundled model's tokenizer and template, and no instances."""
    config = GatewayConfig(port=0, model_dir=str(CHECKPOINT), model_name="tiny")
    server = ApiServer(frontend or FakeFrontend(), config, Preparer(config))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def ask(server: ApiServer, path: str, **body: Any) -> Any:
    status, _, answer = await exchange(server, request(body, path=path))
    assert status == 200, answer
    return json.loads(answer)


async def test_there_and_back():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = "What is the total?<|im_end|>"
    async with tiny() as server:
        told = await ask(server, "/tokenize", prompt=text, return_token_strings=True)
        plain = await ask(server, "/tokenize", prompt=text, add_special_tokens=False)
        empty = await ask(server, "/tokenize", prompt="", add_special_tokens=False)
        back = await ask(server, "/detokenize", model="tiny", tokens=plain["tokens"])
    assert told["tokens"] == tokenizer.encode(text)
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 4096
    assert told["token_strings"] == tokenizer.convert_ids_to_tokens(told["tokens"])
    assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert plain["token_strings"] is plain["token_strs"] is None
    assert told["token_strs"] == told["token_strings"]
    assert (empty["count"], empty["tokens"]) == (0, [])
    assert back == {"prompt": text}


async def test_the_count_is_what_usage_says():
    """With an image, and with and without the beginning of an answer."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "read"}, part(png(64, 64))]}]
    async with tiny() as server:
        body = {"messages": messages, "max_tokens": 1}
        status, _, answer = await exchange(server, request(body))
        assert status == 200, answer
        told = await ask(server, "/tokenize", messages=messages)
        bare = await ask(server, "/tokenize", messages=messages, add_generation_prompt=False)
    assert told["count"] == json.loads(answer)["usage"]["prompt_tokens"]
    assert told["tokens"][: bare["count"]] == bare["tokens"]
    assert 0 < told["count"] - bare["count"] < 16


async def test_anthropic_s_client_counts():
    async with tiny() as server:
        url = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            asked: Any = {"model": "tiny", "messages": HI, "system": "be brief"}
            told = await client.messages.count_tokens(**asked)
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.count_tokens(**asked, extra_body={"max_tokens": 3})
        count = (
            await ask(
                server, "/tokenize", messages=[{"role": "system", "content": "be brief"}, *HI]
            )
        )["count"]
    assert told.input_tokens == count
    assert caught.value.body["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens[0]"),
    ],
)
async def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str):
    async with serving() as (server, _, _):
        error = await refused(server, request(body, path=path), 400)
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})]
)
async def test_another_model(path: str, body: dict[str, Any]):
    async with serving() as (server, _, _):
        error = await refused(server, request({**body, "model": "other"}, path=path), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_how_many_are_open_has_a_limit():
    """No place of a generation is taken, and none is needed."""
    async with serving(max_open_requests=1) as (server, frontend, preparer):
        preparer.gate = asyncio.Event()
        first = asyncio.create_task(ask(server, "/tokenize", messages=HI))
        await preparer.entered.wait()
        error = await refused(server, request({"prompt": "a"}, path="/tokenize"), 429)
        assert error["code"] == "overloaded"
        preparer.gate.set()
        assert (await first)["count"] == 2
        assert (await ask(server, "/tokenize", prompt="a"))["count"] == 2
        assert not frontend.streams
