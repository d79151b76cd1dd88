"""Ids of tokens in answers: of the prompt, of what was generated, of what ended it, of
log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.answers.answer import AnswerFacts
from epd.api.answers.choice import Choice, Delta, joined
from epd.api.answers.choices import make_choices
from epd.api.asked.reasoning import Place
from epd.api.http.errors import ApiError
from epd.api.openai.answer import ChatAnswer, CompletionAnswer, OpenAIAnswer
from epd.api.openai.validation import read_chat, read_completion
from epd.api.prompts.prepare import Prompt
from epd.config import Limits
from epd.frontend import GenerationUpdate
from epd.messages import TokenLogprobs
from tests.api.answers.test_echo import complete
from tests.api.fakes import EOS, FakePreparer, FakeStream, said
from tests.api.test_server import HI, ask, chunks_of, client_of

TOOL = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MODEL = FakePreparer()
WHICH = ord("!")  # a token that ends an answer because its client says so


def updates_of(text: str, cuts: Sequence[int], finish: str) -> list[GenerationUpdate]:
    """The answer in pieces; one that stops has its last token in the last of them."""
    ids = [ord(char) for char in text]
    bounds = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    pieces = [tuple(ids[begin:end]) for begin, end in pairwise(bounds)]
    if finish == "length" and len(cuts) % 2:
        pieces.append(())
    *others, last = [GenerationUpdate(piece) for piece in pieces]
    return [*others, last._replace(finish_reason=finish)]


def told(body: dict[str, Any], updates: Sequence[GenerationUpdate]) -> tuple[Any, list[Any]]:
    """The object of a request that does not stream, and the chunks of one that does."""
    is_chat = "messages" in body
    asked = (read_chat if is_chat else read_completion)(body, MODEL, Limits())
    prompt = Prompt((104, 105), (), "", reasoning=Place.AHEAD if is_chat else Place.BEHIND)
    facts = AnswerFacts("r", "tiny", 0, 2, MODEL.token_text)

    def begun() -> tuple[OpenAIAnswer, Choice]:
        streams = [FakeStream("r")]
        (choice,) = make_choices(streams, asked, [prompt], MODEL, tells_reasoning=is_chat)
        return (ChatAnswer if is_chat else CompletionAnswer)(facts, asked), choice

    def taken(choice: Choice) -> Iterator[Delta]:
        yield from (choice.take([update]) for update in updates if not choice.finish_reason)

    answer, choice = begun()
    value = json.loads(answer.whole([(choice, joined([*taken(choice)]))]))
    answer, choice = begun()
    sent = answer.opening(choice) + b"".join(answer.events(choice, d) for d in taken(choice))
    lines = filter(None, sent.decode().split("\n\n"))
    return value, [json.loads(line.removeprefix("data: ")) for line in lines]


WORDS = st.sampled_from(["a", "b", "\n", "END", "<think>", "</think>", CALL, CALL[:20], "é", "{"])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(WORDS, min_size=1, max_size=6),
    st.lists(st.integers(0, 999), max_size=8),
    st.sampled_from(["", chr(EOS), chr(WHICH)]),
    st.sampled_from([{}, {"stop": ["END", "b\n"]}, {"stop": "a", "min_tokens": 2}]),
    st.sampled_from([{}, {"tools": [TOOL]}, {"prompt": "hi"}, {"prompt": "hi", "echo": True}]),
    st.booleans(),
)
def test_ids_are_those_of_the_tokens_that_an_answer_counts(
    words: list[str], cuts: list[int], end: str, stops: Any, form: Any, include: bool
) -> None:
    """Whole and streamed, however it comes: with stop strings, calls, reasoning and an echo."""
    text = "".join(words) + end
    body = {"return_token_ids": True, "stop_token_ids": [WHICH], **stops, **form}
    body |= {} if "prompt" in form else {"messages": HI, "include_reasoning": include}
    value, chunks = told(body, updates_of(text, cuts, "stop" if end else "length"))
    (choice,) = value["choices"]
    ids = choice["token_ids"]
    assert len(ids) == value["usage"]["completion_tokens"]
    assert text.startswith("".join(map(chr, ids)))
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert [i for piece in pieces for i in piece.get("token_ids", ())] == ids
    # What the prompt was is told once: beside the choices of chat, in each choice of completions.
    holders = (choice, pieces) if "prompt" in form else (value, chunks)
    assert holders[0]["prompt_token_ids"] == [104, 105]
    assert [h["prompt_token_ids"] for h in holders[1] if "prompt_token_ids" in h] == [[104, 105]]
    assert "prompt_token_ids" in holders[1][0]
    # What ended it, in the last chunk only.
    ended = (choice["stop_reason"], choice["matched_stop"])
    assert [(p["stop_reason"], p["matched_stop"]) for p in pieces if "stop_reason" in p] == [ended]
    assert pieces[-1]["matched_stop"] == ended[1]
    if isinstance(ended[1], str):
        said, is_call = "".join(map(chr, ids)), "tools" in form  # or was held back as one
        assert said.endswith(ended[1]) or (is_call and ended[1] in said)
        assert ended[1] in stops["stop"]
        assert ended[0] == ended[1]
    elif len(ids) == len(text) and end:
        assert ended == (WHICH if end == chr(WHICH) else None, ord(end))
    else:
        assert ended == (None, None)
    if form.get("prompt") and not stops:
        shown = "".join(map(chr, ids)).removesuffix(end)
        assert choice["text"] == ("hi" if form.get("echo") else "") + shown


async def test_ids_of_several_choices_as_the_official_client_sees_them() -> None:
    scripts = [[said("a"), 0.02, said(f"b{chr(EOS)}", "stop")], [said("cd", "length")]]
    async with client_of(*scripts, *scripts) as (client, _, _):
        answer = await ask(client, n=2, extra_body={"return_token_ids": True})
        assert answer.prompt_token_ids == [104, 105]
        assert [c.token_ids for c in answer.choices] == [[97, 98, EOS], [99, 100]]
        assert [c.matched_stop for c in answer.choices] == [EOS, None]
    async with client_of(*scripts, *scripts) as (client, _, _):
        chunks = await chunks_of(client, n=2, extra_body={"return_token_ids": True})
        openings = [chunk for chunk in chunks if getattr(chunk, "prompt_token_ids", None)]
        assert [chunk.choices[0].delta.role for chunk in openings] == ["assistant"] * 2
        plain = await ask(client)
        assert not hasattr(plain, "prompt_token_ids") and not hasattr(plain.choices[0], "token_ids")


async def test_of_a_prompt_alone_no_ids_are_generated() -> None:
    async with client_of([said(f"x{chr(EOS)}", "stop")]) as (client, _, _):
        extra = {"return_token_ids": True}
        answer = await complete(client, prompt="hi", echo=True, max_tokens=0, extra_body=extra)
    (choice,) = answer.choices
    assert (choice.prompt_token_ids, choice.token_ids) == ([104, 105], [])
    assert (choice.finish_reason, choice.matched_stop) == ("length", None)


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_as_ids(stream: bool) -> None:
    """The text's offsets and bytes stay those of the text."""
    extra = {"return_tokens_as_token_ids": True}
    async with client_of([said("éa", "stop", logprobs=True)]) as (client, _, _):
        chat = await ask(client, logprobs=True, top_logprobs=1, extra_body=extra, stream=stream)
        chats = [chunk async for chunk in chat] if stream else [chat]
        plain = await complete(client, prompt="x", logprobs=1, extra_body=extra, stream=stream)
        plains = [chunk async for chunk in plain] if stream else [plain]
    content = [e for c in chats if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in content] == ["token_id:233", "token_id:97"]
    assert content[0].bytes == list("é".encode())
    assert [entry.top_logprobs[0].token for entry in content] == ["token_id:233", "token_id:97"]
    logprobs = plains[0].choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["token_id:233", "token_id:97"], [0, 1])
    assert logprobs.top_logprobs[0] == {"token_id:233": -0.5}


def named(sampled: int, *ids: int) -> GenerationUpdate:
    """An answer of one token, with the log-probabilities of others."""
    entry = TokenLogprobs(sampled, -0.5, tuple((i, -float(i)) for i in ids))
    return GenerationUpdate((sampled,), (entry,), "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sampled", "ids"), [(42, [80]), (42, [70, 80, 90]), (80, [70, 80, 90])])
async def test_log_probabilities_of_tokens_by_id(
    sampled: int, ids: list[int], stream: bool
) -> None:
    """As in vLLM: these and the sampled one, instead of the likeliest, however many."""
    extra = {"logprob_token_ids": [*ids, ids[0]], "return_tokens_as_token_ids": True}
    fields: Any = {"extra_body": extra, "stream": stream, "max_tokens": 1}
    async with client_of([named(sampled, *ids)]) as (client, frontend, _):
        chat = await ask(client, logprobs=True, top_logprobs=1, **fields)
        last = [chunk async for chunk in chat][-1] if stream else chat
        plain = await complete(client, prompt="hi", logprobs=0, **fields)
        first = await anext(aiter(plain)) if stream else plain
    for generation in frontend.generations:
        assert generation.sampling.logprob_token_ids == tuple(ids)
    (entry,) = last.choices[0].logprobs.content
    expected = {f"token_id:{i}": -float(i) for i in ids}
    expected.setdefault(f"token_id:{sampled}", -0.5)
    assert {top.token: top.logprob for top in entry.top_logprobs} == expected
    assert first.choices[0].logprobs.top_logprobs == [expected]


async def test_an_echo_has_the_likeliest_all_the_same() -> None:
    """Of the prompt's tokens nothing is told by id."""
    of_prompt = TokenLogprobs(105, -1.0, ((105, -1.0), (122, -2.0)), 1)
    update = named(120, 70, 80)
    first = update.logprobs[0].with_prompt((of_prompt,))
    async with client_of([update._replace(logprobs=(first,))]) as (client, _, _):
        extra = {"logprob_token_ids": [70, 80]}
        answer = await complete(client, prompt="hi", echo=True, logprobs=1, extra_body=extra)
    tops = answer.choices[0].logprobs.top_logprobs
    assert tops == [None, {"i": -1.0}, {"F": -70.0, "P": -80.0, "x": -0.5}]


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (read_chat, {"logprob_token_ids": []}),
        (read_chat, {"logprob_token_ids": [5]}),
        (read_chat, {"logprobs": False, "logprob_token_ids": [5]}),
        (read_chat, {"logprobs": True, "logprob_token_ids": []}),
        (read_chat, {"logprobs": True, "logprob_token_ids": [5] * 129}),
        (read_chat, {"logprobs": True, "logprob_token_ids": [MODEL.vocab_size]}),
        (read_chat, {"logprobs": True, "logprob_token_ids": [-1]}),
        (read_chat, {"logprobs": True, "logprob_token_ids": 5}),
        (read_completion, {"logprob_token_ids": [5]}),
        (read_completion, {"logprobs": 1, "echo": True, "max_tokens": 0, "logprob_token_ids": [5]}),
    ],
)
def test_ids_that_nothing_can_be_told_of_are_refused(read: Any, fields: Any) -> None:
    prompt = {"messages": HI} if read is read_chat else {"prompt": "hi"}
    with pytest.raises(ApiError) as caught:
        read({**prompt, **fields}, MODEL, Limits())
    assert (caught.value.status, (caught.value.param or "")[:17]) == (400, "logprob_token_ids")
