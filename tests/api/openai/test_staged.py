"""Stages that clients drive: what they may send, what they get for their next stage."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat, read_completion, read_encode
from epd.config import Limits
from epd.frontend import GenerationUpdate
from tests.api.fakes import FakeFrontend, FakePreparer, said, serving
from tests.api.test_server import ask, client_of

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,image"}}]}]
PROXY = {  # as the proxies of vLLM's examples write it
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CLAIM = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "gw-1-7"}


def test_one_prompt_at_a_time() -> None:
    body = {"prompt": ["one", "two"], "kv_transfer_params": PROXY}
    with pytest.raises(ApiError, match="one prompt at a time"):
        read_completion(body, FakePreparer(), Limits())


def read(**fields: Any) -> Any:
    return read_chat({"messages": HI, **fields}, FakePreparer(), Limits())


async def test_a_prompt_alone_answers_with_params_for_decode() -> None:
    async with client_of([said("h", "length")]) as (client, frontend, _):
        body = {"kv_transfer_params": PROXY}
        answer = await ask(client, max_tokens=1, extra_body=body)
        assert answer.kv_transfer_params == {"a": 1}
        (generation,) = frontend.generations
        assert (generation.stage, generation.sampling.max_tokens) == ("prefill", 1)
        await ask(client, extra_body=body)
        assert frontend.generations[1].sampling.max_tokens == 1


async def test_params_of_a_prompt_become_a_claim() -> None:
    async with client_of() as (client, frontend, _):
        answer = await ask(client, extra_body={"kv_transfer_params": CLAIM})
        assert "kv_transfer_params" not in answer.model_dump(), "the last stage tells nothing"
        (generation,) = frontend.generations
        assert (generation.stage, generation.claim) == ("", "gw-1-7")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {"remote_blocks": [1]}}, "kv_transfer_params.remote_blocks"),
        ({"kv_transfer_params": PROXY | CLAIM}, "kv_transfer_params"),
        (
            {"kv_transfer_params": {"do_remote_prefill": True}},
            "kv_transfer_params.remote_request_id",
        ),
        ({"kv_transfer_params": PROXY, "max_tokens": 2}, "max_tokens"),
        ({"kv_transfer_params": PROXY, "n": 2}, "n"),
        ({"ec_transfer_params": "h"}, "ec_transfer_params"),
        ({"ec_transfer_params": {"h": []}}, "ec_transfer_params.h"),
        ({"ec_transfer_params": {"h": {}}}, "ec_transfer_params.h.remote_engine_id"),
        ({"ec_transfer_params": {"h": {"addr": "x"}}}, "ec_transfer_params.h.addr"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_images_alone_have_a_path_of_their_own() -> None:
    """So a proxy that knows encoders by their URL needs no other change."""
    rows = [GenerationUpdate((), (), "length")]
    async with serving(FakeFrontend(rows)) as (server, frontend, _):
        url = f"http://127.0.0.1:{server.port}/encode/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as encoder:
            answer = await ask(encoder, messages=IMAGE, max_tokens=1)
            assert answer.ec_transfer_params == {"h": {"transport": "shm"}}
            assert answer.choices[0].message.content == ""
            assert frontend.generations[0].stage == "encode"
            assert [model.id async for model in encoder.models.list()] == ["tiny"]
            with pytest.raises(openai.BadRequestError, match="no image or video to encode"):
                await ask(encoder, messages=HI)
    assert frontend.streams[-1].cancelled.is_set(), "its place is free again"


async def test_params_of_images_must_be_of_this_request() -> None:
    """F38: a hash holds tenant and content, so nobody can name what another tenant has shown."""
    async with client_of() as (client, frontend, preparer):
        (item,) = (await preparer.chat(IMAGE)).items
        params = {item.mm_hash: {"remote_engine_id": "e1", "num_rows": 64, "transport": "shm"}}
        await ask(client, messages=IMAGE, extra_body={"ec_transfer_params": params})
        assert frontend.generations[0].encoded_at == {item.mm_hash: "e1"}
        strange = {"ab" * 32: {"remote_engine_id": "e1"}}
        with pytest.raises(openai.BadRequestError, match="no image of this request"):
            await ask(client, messages=IMAGE, extra_body={"ec_transfer_params": strange})


def test_a_request_for_images_alone_is_a_chat_request() -> None:
    asked = read_encode({"messages": IMAGE, "max_tokens": 7}, FakePreparer(), Limits())
    assert (asked.staged.stage, asked.max_tokens) == ("encode", 1)
    with pytest.raises(ApiError, match="unknown parameter"):
        read_encode({"messages": IMAGE, "nonsense": 7}, FakePreparer(), Limits())
