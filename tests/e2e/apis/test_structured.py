"""Constrained output through real processes: prefill draws the first token, decode the others."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from epd.cli.configure.model_check import BUNDLED_NAME
from tests.e2e.server import Server
from tests.e2e.shared import MAX_OPEN_REQUESTS
from tests.hostile.deadly import CHAIN, DEEP, SLOW, TERMINALS
from tests.receipt import RECEIPT, is_receipt

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(apart: Server) -> Server:
    return apart


def settings(server: Server) -> dict[str, object]:
    return {"base_url": f"{server.base_url}/v1", "api_key": "none", "max_retries": 0}


async def test_answers_follow_their_schema(server: Server) -> None:
    """Each with a draw of its own: the first token is sampled by prefill, the others by decode."""
    wanted = {"type": "json_schema", "json_schema": {"name": "receipt", "schema": RECEIPT}}

    async def ask(client: AsyncOpenAI, seed: int) -> str:
        answer = await client.chat.completions.create(
            model=BUNDLED_NAME,
            messages=[{"role": "user", "content": "Describe the receipt."}],
            response_format=wanted,
            temperature=1.3,
            seed=seed,
            max_tokens=400,
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    async with AsyncOpenAI(**settings(server)) as client:
        texts = await asyncio.gather(*(ask(client, seed) for seed in range(MAX_OPEN_REQUESTS)))
    assert [text for text in texts if not is_receipt(text)] == []
    assert len(set(texts)) > MAX_OPEN_REQUESTS / 2


def test_choice_and_regex_stream(server: Server) -> None:
    client = OpenAI(**settings(server))
    for extra, pattern in (
        ({"guided_choice": ["north", "south"]}, "north|south"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
    ):
        stream = client.chat.completions.create(
            model=BUNDLED_NAME,
            messages=[{"role": "user", "content": "Where?"}],
            extra_body=extra,
            stream=True,
        )
        chunks = [chunk.choices[0] for chunk in stream]
        assert re.fullmatch(pattern, "".join(choice.delta.content or "" for choice in chunks))
        assert chunks[-1].finish_reason == "stop"
    client.close()


def test_a_required_tool_is_called(server: Server) -> None:
    """By a model that never learned to: the grammar makes the call, its arguments are valid."""
    function = {"name": "book", "parameters": RECEIPT}
    fields: dict[str, Any] = {
        "model": BUNDLED_NAME,
        "messages": [{"role": "user", "content": "Book it."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
    }
    with OpenAI(**settings(server)) as client:
        whole = client.chat.completions.create(**fields).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        (call,) = whole.message.tool_calls
        assert call.function.name == "book"
        assert is_receipt(call.function.arguments)
        chunks = [
            chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)
        ]
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
        assert "".join(p.function.arguments for p in pieces) == call.function.arguments
        assert chunks[-1].finish_reason == "tool_calls"
        answer = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        fields["messages"] += [whole.message.model_dump(exclude_none=True), answer]
        again = client.chat.completions.create(**fields | {"tool_choice": "none", "max_tokens": 8})
        assert again.choices[0].message.tool_calls is None


async def test_a_grammar_that_kills_its_compiler_is_refused(server: Server) -> None:
    """Fault F66: the gateway lives on, and a neighbour waits neither for these nor for slow."""
    pids = {process.pid for process in server.processes()}
    messages = [{"role": "user", "content": "hello"}]

    async def ask(client: AsyncOpenAI, **extra: Any) -> float:
        began_s = time.monotonic()
        await client.chat.completions.create(
            model=BUNDLED_NAME, messages=messages, max_tokens=2, extra_body=extra
        )
        return time.monotonic() - began_s

    async with AsyncOpenAI(**settings(server)) as client:
        slow = asyncio.create_task(ask(client, guided_grammar=SLOW))
        deadly = [{"guided_json": DEEP}, {"guided_grammar": CHAIN}, {"guided_grammar": TERMINALS}]
        for extra in deadly * 2:
            with pytest.raises(BadRequestError, match="too deeply") as caught:
                await ask(client, **extra)
            assert caught.value.param == next(iter(extra))
        waits_s = [await ask(client) for _ in range(5)]
        waits_s.append(await ask(client, guided_json={"const": "a small one"}))
        with pytest.raises(BadRequestError, match=r"2 s of a processor|256 MiB"):
            await slow
    assert max(waits_s) < 2.0, waits_s  # 0.1 on an idle machine
    assert pids <= {process.pid for process in server.processes()}
    counts = server.metrics()
    assert counts['epd_grammar_proofs_total{outcome="crash"}'] == 3
    assert counts['epd_grammar_proofs_total{outcome="remembered"}'] >= 3
