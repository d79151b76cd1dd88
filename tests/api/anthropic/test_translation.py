"""Three APIs, one chat: the same question is the same prompt, with the same image in it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from epd.api.anthropic.request import read_message
from epd.api.asked.asked import Asked
from epd.api.http.errors import ApiError, bad_request
from epd.api.openai.translation import Names
from epd.api.prompts.prepare import Preparer
from epd.api.responses.request import read_response
from epd.api.server import ApiServer
from epd.config import GatewayConfig, Limits
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakeFrontend, FakePreparer, said
from tests.api.prompts.test_prepare import png
from tests.api.wire import CHAT, exchange, request

TEXT = "What is this?"


def bodies(data: str) -> dict[str, dict[str, Any]]:
    """By path, one question about one image."""
    url = f"data:image/png;base64,{data}"
    chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": TEXT}]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    return {
        CHAT: {"messages": [{"role": "user", "content": chat}]},
        "/v1/responses": {"input": [{"role": "user", "content": items}]},
        "/v1/messages": {"messages": [{"role": "user", "content": blocks}], "max_tokens": 9},
    }


@pytest.mark.parametrize("is_large", [False, True])
async def test_one_image_in_every_form(is_large: bool):
    """Large ones are decoded while they arrive, and are never a text."""
    raw = png(64, 64)
    if is_large:  # behind its end: part of the file, and of no pixel
        raw += random.Random(1).randbytes(200_000)
    config = GatewayConfig(port=0, model_dir=str(CHECKPOINT))
    frontend = FakeFrontend([said("hi", "stop")])
    server = ApiServer(frontend, config, Preparer(config))
    await server.start()
    for path, body in bodies(base64.b64encode(raw).decode()).items():
        status, _, answer = await exchange(server, request(body, path=path))
        assert status == 200, (path, answer)
        usage = json.loads(answer)["usage"]
        counted = usage.get("prompt_tokens") or usage["input_tokens"]
        assert counted == len(frontend.generations[-1].token_ids)
    await server.close()
    first, *others = frontend.generations
    assert len(others) == 2 and first.items[0].image == raw
    for other in others:
        assert other.token_ids == first.token_ids
        assert other.items[0].mm_hash == first.items[0].mm_hash


def test_what_is_wrong_is_told_under_the_client_s_name():
    names = Names({"messages[1]": "input[4]", "messages[1].content[0]": "input[4].output[2]"})
    deep = names.told(
        bad_request("messages[1].content[0].text must be x", "messages[1].content[0].text")
    )
    assert (deep.param, deep.message) == (
        "input[4].output[2].text",
        "input[4].output[2].text must be x",
    )
    near = names.told(bad_request("a", "messages[1].role"))
    assert near.param == "input[4].role"
    for param in ("messages[10]", "messages", "seed", None):
        assert names.told(bad_request("messages are wrong", param)).param == param
    word = Names({"messages": "input"})
    told = word.told(bad_request("the template does not take these messages", "messages"))
    assert (told.param, told.message) == ("input", "the template does not take these messages")


# --- pictures that tools give ---------------------------------------------------------------------

NUM_RESULTS = 3


def result_urls(result: int) -> list[str]:
    """None, one and two of them, between texts."""
    return [f"https://x/{result}-{n}.png" for n in range(result)]


def messages_with_results() -> dict[str, Any]:
    calls: Any = [
        {"type": "tool_use", "id": f"t{n}", "name": "see", "input": {}} for n in range(NUM_RESULTS)
    ]
    results: Any = []
    for n in range(NUM_RESULTS):
        content: list[Any] = [{"type": "text", "text": f"ahead {n}"}]
        for url in result_urls(n):
            content.append({"type": "image", "source": {"type": "url", "url": url}})
            content.append({"type": "text", "text": f"behind {url}"})
        results.append({"type": "tool_result", "tool_use_id": f"t{n}", "content": content})
    own: Any = [
        {"type": "image", "source": {"type": "url", "url": "https://x/own.png"}},
        {"type": "text", "text": TEXT},
    ]
    talk: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, *own]},
    ]
    return {"messages": talk, "max_tokens": 9}


def responses_with_results() -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": "look"}]
    for n in range(NUM_RESULTS):
        call = {"type": "function_call", "call_id": f"t{n}", "name": "see", "arguments": "{}"}
        items.append(call)
    for n in range(NUM_RESULTS):
        output: list[Any] = [{"type": "input_text", "text": f"ahead {n}"}]
        for url in result_urls(n):
            output.append({"type": "input_image", "image_url": url})
            output.append({"type": "input_text", "text": f"behind {url}"})
        items.append({"type": "function_call_output", "call_id": f"t{n}", "output": output})
    own = [
        {"type": "input_image", "image_url": "https://x/own.png"},
        {"type": "input_text", "text": TEXT},
    ]
    return {"input": [*items, {"role": "user", "content": own}]}


@pytest.mark.parametrize(
    ("body", "read", "places"),
    [
        pytest.param(
            messages_with_results(),
            read_message,
            ["[2].content[1].content[1]", "[2].content[2].content[1]", "[2].content[2].content[3]"],
            id="messages",
        ),
        pytest.param(
            responses_with_results(),
            read_response,
            ["[5].output[1]", "[6].output[1]", "[6].output[3]"],
            id="responses",
        ),
    ],
)
def test_pictures_in_results_keep_their_place_among_them(
    body: Any, read: Callable[..., Asked], places: list[str]
) -> None:
    """They open the next message of the user, in the order of the results, ahead of its own; each
    is told of under its own name."""
    asked = read(body, FakePreparer(), Limits())
    *_, first, second, third, last = asked.messages or ()
    for n, message in enumerate((first, second, third)):
        assert (message["role"], message["tool_call_id"]) == ("tool", f"t{n}")
        texts = [f"ahead {n}", *(f"behind {url}" for url in result_urls(n))]
        assert message["content"] == "\n".join(texts)
    assert last["role"] == "user"
    urls = [p["image_url"]["url"] for p in last["content"] if p["type"] == "image_url"]
    pictures = [url for n in range(NUM_RESULTS) for url in result_urls(n)]
    assert urls == [*pictures, "https://x/own.png"]
    at = len(asked.messages or ()) - 1
    for n, place in enumerate(places):
        told = asked.told(ApiError(400, "x", param=f"messages[{at}].content[{n}].image_url"))
        assert told.param is not None and told.param.startswith(("messages", "input"))
        assert place in told.param, told.param
