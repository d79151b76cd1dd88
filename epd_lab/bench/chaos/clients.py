"""Clients under chaos: the answers that they get, and the time of each piece."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epd.errors import Told
from epd_lab.bench.chaos.questions import Question

if TYPE_CHECKING:
    import aiohttp

PATH = "/v1/chat/completions"
STREAMED, FRESH, LEAVING = 0.7, 0.8, 0.05  # shares of requests
AFTER_ERROR_S = 0.2  # a client that was refused comes again
NOTED_S = 0.5  # shorter pauses are none


class ChaosError(Told):
    """Nothing can be shown; the text has the reason."""


@dataclass(slots=True)
class ChaosChoice:
    """Of an answer: its text, or the names and arguments of its calls."""

    text: str = ""
    tokens: str = ""  # their bytes
    ended: str = ""

    def take(self, choice: Mapping[str, Any]) -> None:
        """Of a whole answer, or a piece."""
        part = choice.get("message") or choice["delta"]
        self.text += part.get("content") or ""
        for call in part.get("tool_calls") or ():
            self.text += (call["function"].get("name") or "") + call["function"]["arguments"]
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self.tokens += f"{bytes(entry['bytes']).hex()} "
        self.ended = choice.get("finish_reason") or self.ended

    def begins(self, whole: ChaosChoice) -> bool:
        return whole.text.startswith(self.text) and whole.tokens.startswith(self.tokens)


@dataclass(slots=True)
class ChaosAnswer:
    """One request; seconds since the load began."""

    question: str
    began_s: float
    ended_s: float = 0.0
    first_s: float = 0.0  # when something of it came; 0: nothing did
    pauses: list[tuple[float, float]] = field(default_factory=list)  # of a stream, behind that
    said: dict[int, ChaosChoice] = field(default_factory=dict)
    error: str = ""  # its status and code, or how the connection ended
    has_left: bool = False
    lost_gateway: bool = False  # the connection broke
    request_id: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.has_left

    def take(self, event: Mapping[str, Any], now_s: float) -> None:
        self.request_id = event["id"]
        for choice in event["choices"]:
            self.said.setdefault(choice["index"], ChaosChoice()).take(choice)
        self.first_s = self.first_s or now_s


class ChaosClients:
    """All of a run, and their answers."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], seed: int) -> None:
        """`urls`: of gateways; who is refused a connection, or loses it, goes to the next."""
        self.answers: list[ChaosAnswer] = []
        self.num_moved = 0  # requests that were asked of a further gateway
        self._session, self._urls, self._seed = session, urls, seed
        self._at = 0
        self._zero_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    async def goldens(
        self, asked: Sequence[Question], at_once: int
    ) -> dict[str, dict[int, ChaosChoice]]:
        """Right answers: those while nothing fails; the load begins afterwards.  Raises
        ChaosError."""
        found, remaining = {}, iter(asked)

        async def work() -> None:
            for question in remaining:
                answer = await self._ask(question, "goldens", stream=False)
                if not answer.said or answer.error:
                    raise ChaosError(f"{question.name!r} has no answer without faults: {answer}")
                found[question.name] = answer.said

        await asyncio.gather(*(work() for _ in range(at_once)))
        self._zero_s = time.monotonic()
        return found

    async def load(self, number: int, asked: Sequence[Question], until_s: float) -> None:
        """One client, which asks again when it is answered.  Most are of a tenant whose caches are
        empty, the others of one whose caches answer."""
        draw = random.Random(f"client {self._seed} {number}")
        while self.now_s() < until_s:
            tenant = f"{number}-{draw.random()}" if draw.random() < FRESH else "all"
            leave_after = draw.randrange(1, 20) if draw.random() < LEAVING else 0
            stream = leave_after > 0 or draw.random() < STREAMED
            answer = await self._ask(draw.choice(asked), tenant, stream, leave_after)
            self.answers.append(answer)
            if answer.error:
                await asyncio.sleep(AFTER_ERROR_S)

    async def _ask(
        self, question: Question, tenant: str, stream: bool, leave_after: int = 0
    ) -> ChaosAnswer:
        """To its end, or for so many events; of one gateway after another, until one answers."""
        headers = {"X-EPD-Tenant": tenant}
        if len(self._urls) > 1:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        self._at = at = self._at + 1
        for tries in range(len(self._urls)):
            url = self._urls[(at + tries) % len(self._urls)]
            self.num_moved += tries > 0
            answer = await self._ask_at(url, question, headers, stream, leave_after)
            if not answer.lost_gateway:
                break
        return answer

    async def _ask_at(
        self,
        url: str,
        question: Question,
        headers: Mapping[str, str],
        stream: bool,
        leave_after: int,
    ) -> ChaosAnswer:
        import aiohttp

        answer, body = ChaosAnswer(question.name, self.now_s()), question.body | {"stream": stream}
        try:
            async with self._session.post(url + PATH, json=body, headers=headers) as response:
                if response.status != 200:
                    answer.error = f"{response.status} {_code(await response.text())}"
                elif stream:
                    await self._read(response.content, answer, leave_after)
                else:
                    answer.take(await response.json(), self.now_s())
        except (aiohttp.ClientError, OSError) as error:
            answer.error, answer.lost_gateway = type(error).__name__, True
        answer.ended_s = self.now_s()
        return answer

    async def _read(self, lines: Any, answer: ChaosAnswer, leave_after: int) -> None:
        heard_s, events = 0.0, 0
        async for line in lines:
            if not line.startswith(b"data: "):
                continue
            now_s = self.now_s()
            if line.strip() == b"data: [DONE]":
                return
            if b'"error"' in line:
                answer.error = f"in the stream {_code(line[6:])}"
                return
            answer.take(json.loads(line[6:]), now_s)
            if heard_s and now_s - heard_s > NOTED_S:
                answer.pauses.append((heard_s, now_s))
            heard_s, events = now_s, events + 1
            if events == leave_after:
                answer.has_left = True
                return
        answer.error = "the stream ended early"


def _code(text: str | bytes) -> str:
    return str(json.loads(text)["error"]["code"])
