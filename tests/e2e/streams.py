"""Streams that are read while something is done to a cluster, and what is said without it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.client import Body, in_session, png, post_all, question
from tests.e2e.server import READY_S, Server, wait_for
from tests.engine.conftest import drawn_image

DEADLINE_S = 100.0  # of each request, and of a wait for an instance that it lacks
# However long a busy machine takes to start a successor: what is shown is that nothing is lost.
PATIENT = {
    "timing__request_timeout_s": DEADLINE_S,
    "timing__topology_timeout_s": DEADLINE_S,
    "timing__first_token_timeout_s": DEADLINE_S,
}
TOLD: Body = {"logprobs": True}  # tokens are compared, not the text that they make
# Each is changed by anything that a migration forgets: which draw is next, what was said already,
# where in its pattern the answer is.
GRAMMAR = {"regex": "([a-z][0-9][A-Z][-+]([0-9]{2}|[a-f]{3}) ){60}"}
WITHOUT_END: Body = {"ignore_eos": True}
PENALTIES: Body = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}
BOUND: Body = {"structured_outputs": GRAMMAR}
DRAWN: tuple[Body, ...] = (
    WITHOUT_END,
    WITHOUT_END | {"temperature": 1.2, "top_p": 0.95, "seed": 11},
    WITHOUT_END | PENALTIES,
    BOUND | {"temperature": 1.0, "seed": 5},
    BOUND | PENALTIES | {"temperature": 1.1, "seed": 7},
)


@dataclass(slots=True)
class Streamed:
    """How one streamed request went."""

    status: int = 0
    tokens: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # if a request wants them
    states: list[str] = field(default_factory=list)  # of its timeline, as MACHINE STATE
    error: dict[str, Any] = field(default_factory=dict)
    said_s: list[float] = field(default_factory=list)  # when tokens came
    is_done: bool = False
    lasted_s: float = 0.0

    @property
    def has_migrated(self) -> bool:
        return "GENERATION MIGRATING" in self.states or self.has_moved_kv

    @property
    def has_moved_kv(self) -> bool:
        """Handed over by the instance that decoded it; computed again nowhere."""
        return "REQUEST MOVING" in self.states and "GENERATION MIGRATING" not in self.states

    def gaps_s(self, from_s: float, to_s: float) -> list[float]:
        """Between its tokens that came in that time."""
        pairs = itertools.pairwise(self.said_s)
        return [later - sooner for sooner, later in pairs if from_s <= later < to_s]

    def take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", {})
        for choice in event.get("choices", ()):
            if said := tokens_of(choice):
                self.said_s.append(time.monotonic())
            self.tokens += said
            self.token_ids += choice.get("token_ids", ())
        for entry in event.get("epd", {}).get("timeline", ()):
            self.states.append(f"{entry['machine'].partition('@')[0]} {entry['state']}")

    def check_has_one_end(self) -> None:
        """A whole answer, or one clear error, in time; after the headers in-band (fault F34)."""
        assert self.lasted_s < DEADLINE_S + 5.0
        assert self.is_done != bool(self.error), self
        if self.error:
            assert self.error["message"] and self.error["code"], self
            assert self.status in {200, 422, 503, 504}, self  # 422: killed twice where it was


def tokens_of(choice: dict[str, Any]) -> list[bytes]:
    return [bytes(entry["bytes"]) for entry in (choice.get("logprobs") or {}).get("content") or ()]


def questions(seed: int, count: int, side: int, num_tokens: int) -> list[Body]:
    """About two fresh images each; answers of a known length, drawn in every way in turn."""
    return [
        question(
            f"question {i}",
            png(drawn_image(1000 * seed + 2 * i, side, side - 10)),
            png(drawn_image(1000 * seed + 2 * i + 1, side - 30, side)),
            **TOLD | {"max_tokens": num_tokens} | DRAWN[i % len(DRAWN)],
        )
        for i in range(count)
    ]


async def stream(
    session: aiohttp.ClientSession, base_url: str, body: Body, into: Streamed
) -> Streamed:
    began_s = time.monotonic()
    url, headers = f"{base_url}/v1/chat/completions", {"X-EPD-Timeline": "1"}
    async with session.post(url, json=body | {"stream": True}, headers=headers) as response:
        into.status = response.status
        if response.status != 200:
            into.error = (await response.json())["error"]
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            assert not into.is_done and not into.error
            if line.strip() == b"data: [DONE]":
                into.is_done = True
            else:
                into.take(json.loads(line[6:]))
    into.lasted_s = time.monotonic() - began_s
    return into


def wait_until_replaced(server: Server, name: str, epoch: int) -> None:
    """Another life of it serves."""

    def healthy() -> bool:
        entry = server.instances().get(name)
        return entry is not None and entry["epoch"] > epoch and entry["state"] == "HEALTHY"

    wait_for(healthy, READY_S, f"{name} serves again")


def first_has_said(replies: Sequence[Streamed]) -> bool:
    return any(reply.tokens for reply in replies)


def all_have_said(replies: Sequence[Streamed]) -> bool:
    return all(len(reply.tokens) > 5 for reply in replies)


async def ask_during(
    server: Server,
    bodies: Sequence[Body],
    act: Callable[[], object],
    when: Callable[[Sequence[Streamed]], bool] | None,
) -> list[Streamed]:
    """Ask all; act when `when` holds, or soon where it is None; read every stream to its end."""
    replies = [Streamed() for _ in bodies]

    async def work(session: aiohttp.ClientSession) -> list[Streamed]:
        asked = [
            asyncio.create_task(stream(session, server.base_url, body, reply))
            for body, reply in zip(bodies, replies, strict=True)
        ]
        if when is None:
            await asyncio.sleep(0.4)
        async with asyncio.timeout(DEADLINE_S):
            while when is not None and not when(replies):
                assert not any(reply.error for reply in replies), replies
                await asyncio.sleep(0.005)
        await asyncio.to_thread(act)
        return await asyncio.gather(*asked)

    return await in_session(work)


async def check_same_afterwards(
    server: Server, bodies: list[Body], replies: list[Streamed]
) -> Counter[str]:
    """What was answered during the fault is what is answered without one, token for token."""
    afterwards = await post_all(server.base_url, bodies)
    for number, (during, after) in enumerate(zip(replies, afterwards, strict=True)):
        during.check_has_one_end()
        if during.is_done:
            assert after.status == 200, after.body
            (choice,) = after.body["choices"]
            expected = tokens_of(choice)
            assert during.tokens == expected != [], f"{number}: {during.tokens}, not {expected}"
    return Counter("answered" if r.is_done else r.error["code"] for r in replies)
