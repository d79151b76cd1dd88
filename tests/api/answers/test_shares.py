"""No key fills the gateway alone, and what is told in one turn of the loop has a bound."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from epd.api.answers.pace import BUDGET, SLICE, WRITE, Pace
from epd.api.http.access import Access
from epd.api.http.errors import ApiError
from epd.api.http.identity import Caller
from epd.api.http.places import Places
from epd.config import AccessConfig, Limits
from epd.frontend import GenerationUpdate
from epd.messages import TokenLogprobs
from tests.api.fakes import FakeFrontend, FakePreparer, serving
from tests.api.wire import HI, Wire, exchange, request, until

TWO_KEYS = AccessConfig(api_keys=("a", "b"))
NUM_TOP = 20


def test_a_key_has_a_share_where_there_are_several() -> None:
    places = Places(Limits(max_open_requests=8), lambda: 2)
    with ExitStack() as stack:
        stack.enter_context(places.taken(Caller("a"), 3))
        with pytest.raises(ApiError, match="has 3 requests open, where 4 may be") as caught:
            stack.enter_context(places.taken(Caller("a"), 2))
        assert (caught.value.status, caught.value.may_be_retried) == (429, True)
        stack.enter_context(places.taken(Caller("a"), 1))
        stack.enter_context(places.taken(Caller("b"), 6))
    with places.taken(Caller("a"), 6):
        pass


@pytest.mark.parametrize("keys", [(), ("a",), ("a", "a")])
def test_who_is_alone_may_have_all(keys: tuple[str, ...]) -> None:
    access = Access(AccessConfig(api_keys=keys))
    places = Places(Limits(max_open_requests=2), lambda: access.num_keys)
    with places.taken(Caller("a")), places.taken(Caller("a")):
        pass


async def test_places_come_back_when_the_answer_has_left() -> None:
    gate = asyncio.Event()
    frontend = FakeFrontend([gate, GenerationUpdate((104,), (), "stop")])
    async with serving(frontend, access=TWO_KEYS, max_open_requests=2) as (server, _, _):
        first = await Wire.to(server)
        first.writer.write(request(HI, authorization="Bearer a"))
        await until(lambda: frontend.generations)
        status, headers, body = await exchange(server, request(HI, authorization="Bearer a"))
        assert (status, "retry-after" in headers) == (429, True)
        assert json.loads(body)["error"]["code"] == "overloaded"
        other = await Wire.to(server)
        other.writer.write(request(HI, authorization="Bearer b"))
        await until(lambda: len(frontend.generations) == 2)
        gate.set()
        assert [(await wire.answer())[0] for wire in (first, other)] == [200, 200]
        assert (await exchange(server, request(HI, authorization="Bearer a")))[0] == 200


# --- what is told in one turn ---------------------------------------------------------------------


class Turn:
    """Counts turns of the loop."""

    def __init__(self) -> None:
        self.number = 0

    async def count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def turns() -> AsyncIterator[Turn]:
    turn = Turn()
    counting = asyncio.create_task(turn.count())
    yield turn
    counting.cancel()


async def test_a_turn_has_a_budget_and_a_line_in_order() -> None:
    pace, told, order = Pace(ThreadPoolExecutor(1)), Counter[int](), list[int]()

    async def tell(number: int) -> None:
        await pace.take(SLICE)
        told[turn.number] += SLICE
        order.append(number)

    async with turns() as turn:
        tasks = [asyncio.create_task(tell(number)) for number in range(100)]
        gone = asyncio.create_task(pace.take(SLICE))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*tasks)
    assert order == list(range(100))
    assert max(told.values()) <= BUDGET + SLICE and len(told) >= 100 * SLICE // BUDGET
    await pace.take(BUDGET - WRITE)  # nobody waits: at once


class Counting(FakePreparer):
    """Counts the tokens whose text is asked for on the loop, by its turn."""

    turn = Turn()

    def __init__(self) -> None:
        super().__init__()
        self.max_context = 1 << 20
        self.told = Counter[int]()

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        if threading.current_thread() is threading.main_thread():
            self.told[self.turn.number] += 1
        return super().token_text(token_id)


def scored(num_tokens: int, finish: str = "") -> GenerationUpdate:
    top = tuple((97 + i, -1.0 - i) for i in range(NUM_TOP))
    return GenerationUpdate(
        (97,) * num_tokens, (TokenLogprobs(97, -1.0, top),) * num_tokens, finish
    )


BURST = [scored(8) for _ in range(12)] + [scored(1, "stop")]


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/chat/completions", False),
        ("/v1/responses", True),
        pytest.param("/v1/chat/completions", True, marks=pytest.mark.long),
        pytest.param("/v1/responses", False, marks=pytest.mark.long),
    ],
)
async def test_many_scored_tokens_that_are_ready_at_once_share_turns(
    monkeypatch: pytest.MonkeyPatch, path: str, *, stream: bool
) -> None:
    """Of unread streams whose clients read again, say: 30 with 97 tokens and 20 alternatives."""
    monkeypatch.setattr("tests.api.fakes.FakePreparer", Counting)
    gate = asyncio.Event()
    frontend = FakeFrontend([gate, *BURST])
    asked: dict[str, Any] = {"stream": stream, "top_logprobs": NUM_TOP, **HI, "logprobs": True}
    if path == "/v1/responses":
        asked = {"stream": stream, "top_logprobs": NUM_TOP, "input": "hi"}
        asked["include"] = ["message.output_text.logprobs"]
    async with serving(frontend) as (server, _, preparer), turns() as turn:
        assert isinstance(preparer, Counting)
        preparer.turn = turn
        wires = [await Wire.to(server) for _ in range(30)]
        for wire in wires:
            wire.writer.write(request(asked, path=path))
        await until(lambda: len(frontend.generations) == len(wires))
        gate.set()
        answers = [await wire.answer() for wire in wires]
        assert {status for status, _, _ in answers} == {200}
        assert min(body.count(b'"bytes":[97]') for _, _, body in answers) >= 97
        if stream:
            assert min(body.count(b"data: ") for _, _, body in answers) > 97 * 21 // SLICE
        assert max(preparer.told.values(), default=0) <= BUDGET + 2 * SLICE
