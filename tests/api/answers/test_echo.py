"""Prompts of completions: several of them, told ahead of their answers, with log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from epd.frontend import GenerationUpdate
from epd.messages import TokenLogprobs
from tests.api.fakes import FakeFrontend, said, serving
from tests.api.test_server import ask, client_of
from tests.api.wire import HI, exchange, request


def entry(char: str, logprob: float, *, rank: int = 1) -> TokenLogprobs:
    top = ((ord(char), logprob), (ord("z"), logprob - 1), (ord("y"), logprob - 2))
    return TokenLogprobs(ord(char), logprob, top, rank)


def scored(prompt: str, text: str, finish: str = "length") -> list[GenerationUpdate]:
    """The first token has what is known of the prompt's, but for its first."""
    of_prompt = tuple(entry(char, -float(at)) for at, char in enumerate(prompt[1:], 1))
    first, *others = [entry(char, -0.5) for char in text]
    token_ids = tuple(map(ord, text))
    return [GenerationUpdate(token_ids, (first.with_prompt(of_prompt), *others), finish)]


async def complete(client: Any, **fields: Any) -> Any:
    return await client.completions.create(model="tiny", **fields)


async def test_several_prompts_are_choices_in_their_order() -> None:
    scripts = [[0.03, *[said(text, "stop")]] for text in ("a", "b", "c", "d")]
    async with client_of(*scripts) as (client, frontend, _):
        answer = await complete(client, prompt=["one", "three"], n=2, seed=5)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate("abcd"))
    asked = ["".join(map(chr, g.token_ids)) for g in frontend.generations]
    assert asked == ["one", "one", "three", "three"]
    assert [g.sampling.seed for g in frontend.generations] == [5, 6, 5, 6]  # as if sent alone
    assert answer.usage.prompt_tokens == 8


async def test_lists_of_ids_and_their_streams() -> None:
    scripts = [[said("a", "stop")], [0.05, said("b", "stop")]]
    async with client_of(*scripts) as (client, _, _):
        chunks = [
            chunk
            async for chunk in await complete(
                client,
                prompt=[[104, 105], [106]],
                stream=True,
                echo=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        ]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert chunk.usage.prompt_tokens == (2 if choice.index == 0 else 1)
    assert texts == {0: "hia", 1: "jb"}
    assert chunks[-1].usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_log_probabilities(stream: bool) -> None:
    async with client_of(scored("hi!", "xy")) as (client, frontend, _):
        asked = {"prompt": "hi!", "echo": True, "logprobs": 2, "max_tokens": 2}
        if stream:
            chunks = [chunk async for chunk in await complete(client, **asked, stream=True)]
            told = [chunk.choices[0] for chunk in chunks]
        else:
            told = (await complete(client, **asked)).choices
    assert frontend.generations[0].sampling.num_prompt_logprobs == 2
    assert "".join(choice.text for choice in told) == "hi!xy"
    logprobs = told[0].logprobs
    assert logprobs.tokens == list("hi!xy")
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs[:2] == [None, {"i": -1.0, "z": -2.0}]


async def test_a_prompt_alone() -> None:
    """max_tokens 0: the token that the step ends with is no part of the answer."""
    async with client_of(scored("hi", "x")) as (client, frontend, _):
        answer = await complete(client, prompt="hi", echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("hi", "length")
    assert choice.logprobs.token_logprobs == [None, -1.0]
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, 2)
    assert frontend.generations[0].sampling.max_tokens == 1


async def test_prompt_logprobs_in_vllm_s_form() -> None:
    async with client_of(scored("hi", "x"), scored("hi", "x")) as (client, _, _):
        extra = {"prompt_logprobs": 1}
        plain = await complete(client, prompt="hi", extra_body=extra)
        chat = await ask(client, extra_body=extra)
    expected = [None, {str(ord("i")): {"logprob": -1.0, "rank": 1, "decoded_token": "i"}}]
    assert plain.choices[0].prompt_logprobs == expected
    assert chat.prompt_logprobs == expected
    assert plain.choices[0].logprobs is None


async def test_nothing_of_the_prompt_unless_asked() -> None:
    frontend = FakeFrontend(scored("hi", "x"))
    async with serving(frontend) as (server, _, _):
        _, _, body = await exchange(server, request({**HI, "logprobs": True}))
    assert b"prompt_logprobs" not in body and b"NaN" not in body
    assert frontend.generations[0].sampling.num_prompt_logprobs == -1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ends_an_answer_may_be_told(stream: bool) -> None:
    asked = {"prompt": "hi", "stop": ["END", "."], "stream": stream}
    script = [said("one E"), 0.02, said("ND two", "length")]
    async with client_of(script, script) as (client, _, _):
        for told, extra in (("one ", {}), ("one END", {"include_stop_str_in_output": True})):
            answer = await complete(client, **asked, extra_body=extra)
            chunks = [chunk async for chunk in answer] if stream else [answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == told


async def test_the_end_of_a_prompt_alone_is_read() -> None:
    async with client_of(scored("lo", "x")) as (client, frontend, _):
        extra = {"truncate_prompt_tokens": 2, "bad_words": ["no"]}
        answer = await complete(client, prompt="hello", echo=True, extra_body=extra)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == ("lox", 2)
    assert frontend.generations[0].sampling.bad_words == ((110, 111),)
