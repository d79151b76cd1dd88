"""Three APIs, one chat: the same question is the same prompt, with the same image in it."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from epd.api.errors import bad_request
from epd.api.prepare import Preparer
from epd.api.server import ApiServer
from epd.api.translation import Names
from epd.config import GatewayConfig
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakeFrontend, said
from tests.api.test_prepare import png
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
