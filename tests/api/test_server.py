"""The API as the official client sees it: answers, streams, usage, and its exception classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from epd.api.server import ApiServer
from epd.frontend import Leave, Refused
from tests.api.fakes import (
    HELLO,
    NUM_IMAGE_ROWS,
    FakeFrontend,
    FakePreparer,
    failed,
    said,
    serving,
)

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(
    *scripts: Any, **limits: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeFrontend, FakePreparer]]:
    async with (
        serving(FakeFrontend(*scripts), **limits) as (server, frontend, preparer),
        openai_client(server) as client,
    ):
        yield client, frontend, preparer


def openai_client(server: ApiServer) -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(model="tiny", **{"messages": HI, **fields})


async def chunks_of(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    return [chunk async for chunk in await ask(client, stream=True, **fields)]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice.delta.content or "" for c in chunks for choice in c.choices if choice.index == index
    )


def finish_of(chunks: list[Any], index: int = 0) -> list[str]:
    choices = [choice for c in chunks for choice in c.choices if choice.index == index]
    return [choice.finish_reason for choice in choices if choice.finish_reason]


# --- whole answers --------------------------------------------------------------------------------


async def test_chat():
    async with client_of() as (client, frontend, _):
        answer = await ask(client)
    assert answer.id == "chatcmpl-gw-1-0"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.system_fingerprint.startswith("epd-")
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("stop", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 5, 7)
    assert frontend.generations[0].sampling.max_tokens == 198
    assert not frontend.streams[0].reasons  # nothing to cancel after a whole answer


async def test_usage_counts_the_rows_of_images():
    content = [
        {"type": "text", "text": "read"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    async with client_of() as (client, frontend, _):
        answer = await ask(client, messages=[{"role": "user", "content": content}])
    assert answer.usage.prompt_tokens == 4 + NUM_IMAGE_ROWS
    assert len(frontend.generations[0].items) == 1


async def test_choices_are_generations_with_seeds_of_their_own():
    scripts = [[0.05, said("one", "stop")], [said("two", "length")]]
    async with client_of(*scripts) as (client, frontend, _):
        answer = await ask(client, n=2, seed=40)
    assert [c.message.content for c in answer.choices] == ["one", "two"]
    assert [c.finish_reason for c in answer.choices] == ["stop", "length"]
    assert [g.sampling.seed for g in frontend.generations] == [40, 41]
    assert answer.usage.completion_tokens == 6


async def test_a_seed_is_drawn_when_none_is_given():
    async with client_of() as (client, frontend, _):
        for _ in range(3):
            await ask(client)
    assert len({g.sampling.seed for g in frontend.generations}) == 3


async def test_logprobs():
    async with client_of([said("hi", "stop", logprobs=True)]) as (client, _, _):
        answer = await ask(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["h", "i"]
    assert content[0].bytes == [104] and content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["h", "i"]


async def test_completions():
    async with client_of([said("héy", "length", logprobs=True)]) as (client, frontend, _):
        answer = await client.completions.create(model="tiny", prompt=[1, 2, 3], logprobs=2)
        empty = await client.completions.create(model="tiny", prompt="abc")
    assert (answer.id, answer.object) == ("cmpl-gw-1-0", "text_completion")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("héy", "length")
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["h", "é", "y"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    assert empty.choices[0].logprobs is None
    assert frontend.generations[0].token_ids == (1, 2, 3)
    assert answer.usage.prompt_tokens == 3


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], list("one END two")])
async def test_a_stop_string_ends_the_answer_wherever_it_is_cut(pieces: list[str]):
    script = [*(said(piece) for piece in pieces), asyncio.Event()]  # goes on until cancelled
    async with client_of(script) as (client, frontend, _):
        answer = await ask(client, stop=["END"])
        chunks = await chunks_of(client, stop=["END"], stream_options={"include_usage": True})
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one END")
    assert (text_of(chunks), finish_of(chunks)) == ("one ", ["stop"])
    assert chunks[-1].usage.completion_tokens == len("one END")
    assert [stream.reasons for stream in frontend.streams] == [[(Leave.ENOUGH, "stop string")]] * 2


async def test_text_held_back_for_a_stop_string_is_given_at_the_end():
    async with client_of([said("one EN"), said("", "length")]) as (client, _, _):
        answer = await ask(client, stop="END")
    assert answer.choices[0].message.content == "one EN"
    assert answer.choices[0].finish_reason == "length"


async def test_stop_strings_wait_for_min_tokens():
    async with client_of([said("a.b.c", "length")]) as (client, _, _):
        answer = await ask(client, stop=".", extra_body={"min_tokens": 3})
    assert answer.choices[0].message.content == "a.b"


# --- streams --------------------------------------------------------------------------------------


async def test_stream():
    script = [said("he"), 0.02, said("llo"), 0.02, said("", "length")]
    async with client_of(script) as (client, _, _):
        chunks = await chunks_of(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert (text_of(chunks), finish_of(chunks)) == ("hello", ["length"])
    assert {c.id for c in chunks} == {"chatcmpl-gw-1-0"}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks)


async def test_text_arrives_while_it_is_made():
    gate = asyncio.Event()
    async with client_of([said("he"), gate, said("llo", "stop")]) as (client, _, _):
        stream = await ask(client, stream=True)
        first = [await anext(stream), await anext(stream)]
        assert text_of(first) == "he"
        gate.set()
        assert text_of([chunk async for chunk in stream]) == "llo"


async def test_usage_counts_right_and_rejected_drafts():
    """Over all updates and choices; an answer without drafts has no such field."""
    script = [
        said("he")._replace(num_accepted=1, num_rejected=3),
        said("llo")._replace(num_accepted=2),
        said("", "stop"),
    ]
    expected = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}
    async with client_of(script, script) as (client, _, _):
        answer = await ask(client, n=2)
    assert answer.usage.completion_tokens == 10
    assert answer.usage.completion_tokens_details.model_dump(exclude_none=True) == expected
    async with client_of(script, script) as (client, _, _):
        chunks = await chunks_of(client, n=2, stream_options={"include_usage": True})
    details = chunks[-1].usage.completion_tokens_details
    assert details.model_dump(exclude_none=True) == expected
    async with client_of() as (client, _, _):
        assert (await ask(client)).usage.completion_tokens_details is None


async def test_usage_tells_what_the_prefix_cache_held():
    """Of the first attempt, and what no choice had computed; streamed and whole."""
    found = [said("he")._replace(num_cached=48), said("llo")._replace(num_cached=64), HELLO[-1]]
    async with client_of(found) as (client, _, _):
        answer = await ask(client)
        chunks = await chunks_of(client, stream_options={"include_usage": True})
    assert answer.usage.prompt_tokens_details.cached_tokens == 48
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 48
    async with client_of(HELLO, found) as (client, _, _):
        answer = await ask(client, n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_stream_of_two_choices():
    scripts = [[said("a"), 0.02, said("b", "stop")], [said("c"), said("d", "length")]]
    async with client_of(*scripts) as (client, _, _):
        chunks = await chunks_of(client, n=2, stream_options={"include_usage": True})
    assert (text_of(chunks, 0), finish_of(chunks, 0)) == ("ab", ["stop"])
    assert (text_of(chunks, 1), finish_of(chunks, 1)) == ("cd", ["length"])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    roles = [choice.index for c in chunks for choice in c.choices if choice.delta.role]
    assert sorted(roles) == [0, 1]


async def test_streamed_logprobs():
    script = [said("h", logprobs=True), 0.02, said("i", "stop", logprobs=True)]
    async with client_of(script) as (client, _, _):
        chunks = await chunks_of(client, logprobs=True)
        stream = await client.completions.create(model="tiny", prompt="x", logprobs=0, stream=True)
        completions = [chunk.choices[0] async for chunk in stream]
    entries = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert entries == ["h", "i"]
    assert "".join(choice.text for choice in completions) == "hi"
    assert [c.logprobs.text_offset for c in completions] == [[0], [1]]  # over the whole text
    assert completions[0].logprobs.top_logprobs == [{"h": -0.5}]  # the token itself always is there


# --- errors ---------------------------------------------------------------------------------------


async def test_exceptions_have_the_right_class():
    async with client_of() as (client, frontend, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, extra_body={"top_a": 1})
        assert (caught.value.param, caught.value.code) == ("top_a", "unknown_parameter")
        with pytest.raises(openai.NotFoundError, match="served model is 'tiny'"):
            await client.chat.completions.create(model="gpt", messages=HI)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")
        with pytest.raises(openai.BadRequestError, match="needs 201"):
            await ask(client, max_tokens=199)
        frontend.refused[len(frontend.streams)] = Refused(429, "full")
        with pytest.raises(openai.RateLimitError, match="full") as limited:
            await ask(client)
        assert limited.value.response.headers["retry-after"] == "1"
    assert not frontend.generations


def whys(frontend: FakeFrontend) -> list[list[Leave]]:
    """Of each choice: why the API gave it up."""
    return [[why for why, _ in stream.reasons] for stream in frontend.streams]


async def test_a_place_is_given_back_when_preparation_fails():
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:x"}}]}]
    async with client_of() as (client, frontend, _):
        with pytest.raises(openai.BadRequestError):
            await ask(client, messages=bad, n=2)
    assert whys(frontend) == [[Leave.REFUSED]] * 2


async def test_all_choices_are_admitted_or_none():
    async with client_of() as (client, frontend, _):
        frontend.refused[2] = Refused(503, "no prefill")
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client, n=3)
    assert caught.value.response.headers["retry-after"] == "1"
    assert whys(frontend) == [[Leave.REFUSED]] * 2
    assert not frontend.generations


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "status"), [("lost", 503), ("media", 400), ("deadline", 504)])
async def test_a_failure_before_the_first_token_has_its_status(
    kind: str, status: int, *, stream: bool
):
    async with client_of([failed(kind, status)]) as (client, frontend, _):
        with pytest.raises(openai.APIStatusError, match="it broke") as caught:
            await ask(client, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, kind)
    assert ("retry-after" in caught.value.response.headers) == (status == 503)
    assert not frontend.streams[0].reasons  # it has ended by itself


async def test_f34_a_failure_after_the_headers_is_told_in_band():
    async with client_of([said("he"), 0.02, failed("lost", 503)]) as (client, _, _):
        stream = await ask(client, stream=True)
        got = []
        with pytest.raises(openai.APIError, match="it broke"):
            async for chunk in stream:
                got.append(chunk)  # noqa: PERF401 (what came before the error counts)
    assert text_of(got) == "he"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "why"), [(500, Leave.FAULT), (400, Leave.REFUSED)], ids=["ours", "the client's"]
)
async def test_when_one_choice_fails_the_others_are_cancelled(
    status: int, why: Leave, *, stream: bool
):
    scripts = [[said("a"), asyncio.Event()], [0.05, failed("engine", status)]]
    async with client_of(*scripts) as (client, frontend, _):
        with pytest.raises(openai.APIError, match="it broke"):
            answer = await ask(client, n=2, stream=stream)
            async for _ in answer:
                assert stream
    assert [s.reasons for s in frontend.streams] == [[(why, "it broke")], []]


async def test_a_generation_that_ends_without_an_answer_is_an_error():
    async with client_of([said("he")]) as (client, _, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
    assert caught.value.status_code == 503


async def test_a_fault_of_ours_is_a_500_and_the_server_lives(caplog: pytest.LogCaptureFixture):
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "crash"}}]}]
    async with client_of() as (client, frontend, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client, messages=bad)
        assert caught.value.status_code == 500
        assert "a fault of ours" not in caught.value.message  # the log's business
        assert (await ask(client)).choices[0].message.content == "hello"
    assert whys(frontend) == [[Leave.FAULT], []]
    assert "a fault of ours" in caplog.text


# --- the rest -------------------------------------------------------------------------------------


async def test_models():
    async with client_of() as (client, _, _):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        model = await client.models.retrieve("tiny")
        assert (model.max_model_len, model.root) == (200, "tiny")


async def test_transfer_params_are_shown_when_asked_for():
    wanted = {"x-epd-transfer-params": "1"}
    async with client_of() as (client, _, _):
        plain = await ask(client)
        answer = await ask(client, extra_headers=wanted)
        chunks = await chunks_of(client, extra_headers=wanted)
        both = await ask(client, extra_headers=wanted, n=2)
    assert not {"ec_transfer_params", "kv_transfer_params"} & set(plain.model_dump())
    for last in (answer, chunks[-1]):
        assert last.ec_transfer_params == {"h": {"transport": "shm"}}
        assert last.kv_transfer_params == {"a": 1}
    assert both.kv_transfer_params == [{"a": 1}] * 2
    assert not any("kv_transfer_params" in chunk.model_dump() for chunk in chunks[:-1])
