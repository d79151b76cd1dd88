"""The official openai client against real processes: every part of the API that is promised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from PIL import Image

from epd.tiny import CHECKPOINT, SAMPLES
from epd.tiny.samples import read_index
from tests.e2e.client import data_url, image_part, png
from tests.e2e.goldens import token_bytes
from tests.e2e.server import Server
from tests.engine.conftest import drawn_image
from tests.engine.reference import reference_inputs, reference_model, tokenizer

pytestmark = pytest.mark.timeout(300)
TOTAL = "What is the total?"


@pytest.fixture(scope="module")
def server(apart: Server) -> Server:
    return apart


@pytest.fixture(scope="module")
def other_server(together: Server) -> Server:
    """The same model in another topology."""
    return together


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    with client_of(server) as client:
        return client.models.list().data[0].id


def client_of(server: Server, kind: Any = OpenAI) -> Any:
    return kind(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120)


def sample(name: str) -> tuple[str, str, str]:
    """Image as a data URL, question, answer."""
    entry = next(entry for entry in read_index() if entry.name == name)
    return data_url((SAMPLES / entry.images[0]).read_bytes()), entry.question, entry.answer


def about(text: str, *urls: str) -> list[Any]:
    parts: list[Any] = [image_part(url) for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def num_tokens(text: str) -> int:
    return len(tokenizer(CHECKPOINT).encode(text, add_special_tokens=False).ids)


# --- chat -----------------------------------------------------------------------------------------


def test_answer_and_usage(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    reply = client.chat.completions.create(model=model, messages=about(text, url), temperature=0)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", answer)
    assert choice.finish_reason == "stop"
    assert reply.object == "chat.completion" and reply.model == model and reply.id
    with Image.open(SAMPLES / "receipt-cafe.png") as image:
        messages = about(text, url)
        messages[0]["content"][0] = {"type": "image"}
        prompt = reference_inputs(CHECKPOINT, messages, [image.convert("RGB")])["input_ids"]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == prompt.shape[1]
    assert reply.usage.completion_tokens == num_tokens(answer) + 1  # and the end token
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_is_the_answer_in_pieces(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    stream = client.chat.completions.create(
        model=model,
        messages=about(text, url),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(contents) == answer
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert not chunks[-1].choices and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens(answer) + 1
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_a_long_answer_comes_in_many_pieces(client: OpenAI, model: str) -> None:
    """Those of a few tokens may come in one, where the gateway is busy."""
    stream = client.chat.completions.create(
        model=model,
        messages=about("Count."),
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    contents = [c.choices[0].delta.content for c in stream if c.choices]
    assert sum(bool(content) for content in contents) > 10


def test_stream_without_usage(client: OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=about("hello"), max_tokens=3, temperature=0, stream=True
        )
    )
    assert all(c.usage is None and c.choices for c in chunks)
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}


def test_several_images_and_their_order(client: OpenAI, model: str) -> None:
    sign, receipt = sample("sign")[0], sample("receipt-total")[0]
    ask = client.chat.completions.create
    first = ask(model=model, messages=about("What does image 1 say?", sign, receipt), temperature=0)
    second = ask(
        model=model, messages=about("What does image 2 say?", receipt, sign), temperature=0
    )
    content = first.choices[0].message.content
    assert content is not None and len(content) > 3
    assert second.choices[0].message.content == content


def test_turns_and_a_system_message(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    messages: list[Any] = [
        {"role": "system", "content": "Read carefully."},
        *about("What is this?", url),
        {"role": "assistant", "content": "A receipt."},
        {"role": "user", "content": text},
    ]
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert reply.choices[0].message.content == answer


def test_choices_differ_and_are_reproducible(client: OpenAI, model: str) -> None:
    def ask(n: int, seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model=model,
            messages=about("say", png(drawn_image(3, 90, 70))),
            n=n,
            seed=seed,
            temperature=2,
            max_tokens=12,
            extra_body={"ignore_eos": True},
        )
        assert [choice.index for choice in reply.choices] == list(range(n))
        assert reply.usage is not None and reply.usage.completion_tokens == 12 * n
        return [choice.message.content for choice in reply.choices]

    two = ask(2, seed=5)
    assert two[0] != two[1]
    assert ask(2, seed=5) == two
    assert ask(1, seed=5) == two[:1]
    assert ask(2, seed=6) != two


async def test_a_seed_gives_one_text_everywhere(
    server: Server, other_server: Server, model: str
) -> None:
    """Alone, in a busy batch, and in another topology."""
    url = png(drawn_image(3, 90, 70))
    settings: dict[str, Any] = {
        "model": model,
        "messages": about("say", url),
        "seed": 11,
        "temperature": 1.2,
        "top_p": 0.95,
        "max_tokens": 24,
        "extra_body": {"ignore_eos": True, "top_k": 50},
    }
    async with (
        client_of(server, AsyncOpenAI) as here,
        client_of(other_server, AsyncOpenAI) as there,
    ):

        async def ask(client: AsyncOpenAI, **changes: Any) -> str | None:
            reply = await client.chat.completions.create(**settings | changes)
            return reply.choices[0].message.content

        alone = await ask(here)
        elsewhere = await ask(there)
        busy = await asyncio.gather(
            *(ask(here, seed=100 + i, messages=about(f"other {i}")) for i in range(20)), ask(here)
        )
    assert elsewhere == alone
    assert busy[-1] == alone
    assert len(set(busy)) > 15


def test_logprobs(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    ask: dict[str, Any] = {"model": model, "messages": about(text, url), "temperature": 0}
    reply = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content
    assert entries is not None
    written = [bytes(entry.bytes or ()) for entry in entries]
    assert b"".join(written[:-1]).decode() == answer
    assert written[-1] == token_bytes("embedded", 258)
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the likeliest
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            **ask, logprobs=True, top_logprobs=3, stream=True
        )
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: OpenAI, model: str, stream: bool) -> None:
    url, text, answer = sample("receipt-total")
    whole, _, _ = answer.partition(".")
    settings: dict[str, Any] = {
        "model": model,
        "messages": about(text, url),
        "temperature": 0,
        "stop": [".", "never"],
    }
    if stream:
        chunks = list(client.chat.completions.create(**settings, stream=True))
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        reply = client.chat.completions.create(**settings)
        content, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert reply.usage.completion_tokens == num_tokens(whole) + 1
    assert (content, reason) == (whole, "stop")


def test_max_completion_tokens(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    reply = client.chat.completions.create(
        model=model, messages=about(text, url), temperature=0, max_completion_tokens=2
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == answer[:2]
    assert reply.usage is not None and reply.usage.completion_tokens == 2


def test_ignore_eos_goes_on_to_the_limit(client: OpenAI, model: str) -> None:
    url, text, answer = sample("receipt-total")
    reply = client.chat.completions.create(
        model=model,
        messages=about(text, url),
        temperature=0,
        max_tokens=40,
        user="somebody",
        extra_body={"ignore_eos": True},
    )
    assert reply.usage is not None and reply.usage.completion_tokens == 40
    assert reply.choices[0].finish_reason == "length"
    assert (reply.choices[0].message.content or "").startswith(answer)


def test_sampling_parameters_have_their_effect(client: OpenAI, model: str) -> None:
    """A bias of 100 forces a token, a penalty forbids repeating it, top_k 1 is greedy."""

    def ask(**settings: Any) -> str | None:
        settings = {"temperature": 0, "max_tokens": 4, "messages": about("hello"), **settings}
        extra = settings.pop("extra", {})
        reply = client.chat.completions.create(model=model, extra_body=extra, **settings)
        return reply.choices[0].message.content

    assert ask(logit_bias={str(ord("x")): 100}) == "xxxx"
    both = {str(ord("x")): 100, str(ord("y")): 100}
    assert len(set(ask(logit_bias=both, max_tokens=30) or "")) == 1
    assert set(ask(logit_bias=both, max_tokens=30, frequency_penalty=2) or "") == {"x", "y"}
    greedy = ask()
    assert ask(temperature=2, seed=1, extra={"top_k": 1}) == greedy
    assert ask(temperature=2, seed=1, extra={"min_p": 1.0}) == greedy
    assert ask(temperature=2, seed=1, top_p=1e-6) == greedy


# --- the rest of the API --------------------------------------------------------------------------


def test_completions(client: OpenAI, model: str) -> None:
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    chat = client.chat.completions.create(
        model=model, messages=about("hello"), temperature=0, max_tokens=8
    )
    ask: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8}
    plain = client.completions.create(**ask, prompt=prompt)
    ids = tokenizer(CHECKPOINT).encode(prompt, add_special_tokens=False).ids
    by_ids = client.completions.create(**ask, prompt=ids)
    pieces = [c.choices[0].text for c in client.completions.create(**ask, prompt=ids, stream=True)]
    assert plain.choices[0].text == chat.choices[0].message.content
    assert by_ids.choices[0].text == plain.choices[0].text == "".join(pieces)
    assert plain.object == "text_completion"
    assert plain.usage is not None and chat.usage is not None
    assert plain.usage.prompt_tokens == len(ids) == chat.usage.prompt_tokens


@pytest.mark.parametrize("other", [False, True])
def test_prompts_are_scored_as_an_evaluation_asks(
    server: Server, other_server: Server, model: str, other: bool
) -> None:
    """lm-eval's local-completions: lists of ids, one token, echo; the sum that it takes of each is
    that of transformers.  Twice, because the second time blocks are in the cache."""
    prompts = [
        tokenizer(CHECKPOINT).encode(text, add_special_tokens=False).ids
        for text in ("The total of this receipt is", "A list of words is no sentence; " * 8)
    ]
    reference = reference_model(CHECKPOINT)
    with client_of(other_server if other else server) as client:
        for _ in range(2):
            asked = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
            answer = client.completions.create(model=model, temperature=0, **asked)
            for choice, ids in zip(answer.choices, prompts, strict=True):
                with torch.inference_mode():
                    logits = reference(torch.tensor([ids])).logits[0, :-1].float()
                expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                found = choice.logprobs.token_logprobs
                assert len(found) == len(ids) + 1 and found[0] is None
                assert found[1:-1] == pytest.approx(expected.tolist(), abs=1e-4)
                greedy = logits.argmax(-1).tolist()
                for i, top in enumerate(choice.logprobs.top_logprobs[1:-1]):
                    assert (found[i + 1] == max(top.values())) == (greedy[i] == ids[i + 1])


def test_models(client: OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=about("hello"))


def test_health_ready_and_metrics(server: Server, client: OpenAI, model: str) -> None:
    assert server.get("/health")[0] == 200
    assert server.get("/ready")[0] == 200
    roles = {name: entry["roles"] for name, entry in server.instances().items()}
    assert roles == {"e0": ["encode"], "p0": ["prefill"], "d0": ["decode"]}
    before = server.metrics()
    client.chat.completions.create(model=model, messages=about("hi"), max_tokens=5, temperature=0)
    after = server.metrics()
    finished = 'epd_requests_total{outcome="finished"}'
    assert after[finished] == before.get(finished, 0) + 1
    server.check_all_returned()


def test_a_long_answer_stays_exact(client: OpenAI, model: str) -> None:
    """Fault F26: 300 tokens after an image; the same text when the prompt is cut elsewhere."""
    ask: dict[str, Any] = {
        "model": model,
        "messages": about("What does the image say?", png(drawn_image(9, 200, 150))),
        "temperature": 0,
        "max_tokens": 300,
        "extra_body": {"ignore_eos": True},
    }
    first = client.chat.completions.create(**ask)
    second = client.chat.completions.create(**ask)
    assert first.usage is not None and first.usage.completion_tokens == 300
    assert first.choices[0].message.content == second.choices[0].message.content
