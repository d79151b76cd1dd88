"""Streamed chat completions against any OpenAI server, and when each piece came back.

A closed loop keeps a number of users busy.  An open one (Poisson, bursts) sends when it is time,
whatever the server does: a slow server cannot slow its own load down.  Times are those of chunks,
as other benchmarks take them: a server that bundles tokens shows fewer, longer gaps.

Released clients were weighed.  guidellm 0.8 has a mean of gaps per answer, locust 2.47 no gaps at
all.  aiperf 0.13 has them, and brings 76 packages that are not installed here.  None of them runs
two streams at once, reads the timeline of an answer, or asks on virtual time (`epd_lab.plan`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from epd.cli.configure.settings import api_keys
from epd.config import Settings
from epd.errors import Told
from epd_lab.bench.workload import Arrival, Closed, Poisson, Wording, chat_body

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

PATH = "/v1/chat/completions"
TIMELINE = {"X-EPD-Timeline": "1"}
PROBE_TOKENS = (16, 80)
PIECE_NBYTES = 256 << 10  # of a body, sent at a time


class ServerError(Told):
    """The server cannot be measured; the text has the reason."""


@dataclass(slots=True)
class Sample:
    """One request: seconds since it was sent, except `sent_s` and `ended_s` (since the start)."""

    sent_s: float
    ended_s: float = 0.0
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between chunks with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.latency_s - self.ttft_s) / max(1, self.output_tokens - 1)


class Server:
    """One OpenAI server under load, or replicas at several addresses, which take turns."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        replicas = [url.rstrip("/") for url in base_url.split(",")]
        self._base_url = replicas[0]
        self._turns = itertools.cycle(replicas)
        self.model = ""

    async def connect(self) -> None:
        """Ask what it serves.  Raises ServerError."""
        import aiohttp

        try:
            async with self._session.get(f"{self._base_url}/v1/models") as response:
                self.model = (await response.json(content_type=None))["data"][0]["id"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TimeoutError) as error:
            raise ServerError(
                f"{self._base_url} does not answer as an OpenAI server ({error}); start it first "
                "or give a topology, such as 1e1pd, to have it started"
            ) from error

    async def text(self, path: str) -> str:
        """A page of the server."""
        async with self._session.get(f"{self._base_url}{path}") as response:
            return await response.text()

    async def wording(self) -> Wording:
        """How many of our words make a token there.  Raises ServerError."""
        counts = []
        for words in PROBE_TOKENS:
            text = Wording(1.0).text(words, "probe")
            sample = await self.ask(chat_body(text, [], 1), time.perf_counter())
            if sample.error:
                raise ServerError(f"{self._base_url} refuses a plain question: {sample.error}")
            counts.append(sample.prompt_tokens)
        low, high = PROBE_TOKENS
        return Wording((high - low) / max(1, counts[1] - counts[0]))

    async def ask(self, body: bytes, zero_s: float) -> Sample:
        """Send one and read its stream to the end; an error becomes part of the sample."""
        import aiohttp

        named = b'{"model": ' + json.dumps(self.model).encode() + b", "
        began_s = time.perf_counter()
        sample = Sample(began_s - zero_s)
        nbytes = len(named) + len(body) - 1
        headers = TIMELINE | {"Content-Type": "application/json", "Content-Length": str(nbytes)}
        try:
            async with self._session.post(
                next(self._turns) + PATH, data=_pieces(named, body), headers=headers
            ) as response:
                if response.status != 200:
                    sample.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                else:
                    await _Reading(sample, began_s).read(response.content)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.ended_s = time.perf_counter() - zero_s
        return sample


async def _pieces(named: bytes, body: bytes) -> AsyncIterator[bytes]:
    """The body with what stands in front; others send and read between two pieces of it."""
    yield named
    for at in range(1, len(body), PIECE_NBYTES):
        yield body[at : at + PIECE_NBYTES]
        await asyncio.sleep(0)


class _Reading:
    """The stream of one answer: its events become a sample."""

    def __init__(self, sample: Sample, began_s: float) -> None:
        self._sample = sample
        self._began_s = began_s
        self._last_s = self._finished_s = 0.0
        self._is_over = False  # it was told so, or that it failed

    async def read(self, content: aiohttp.StreamReader) -> None:
        """To the end, which comes behind the last event: else its connection is not used again."""
        tail = b""
        async for chunk in content.iter_any():
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and not self._is_over:
                    self._take(line[6:].rstrip())
        sample = self._sample
        if not self._is_over:
            sample.error = "the stream ended without [DONE]"
        elif not self._last_s and self._finished_s and sample.output_tokens:
            # tokens without text, told of in one chunk
            sample.ttft_s = self._finished_s - self._began_s
        elif not self._last_s and not sample.error:
            sample.error = "no token came"

    def _take(self, data: bytes) -> None:
        sample = self._sample
        if data == b"[DONE]":
            self._is_over = True
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            sample.error = str(event["error"].get("message", event["error"]))
            self._is_over = True
            return
        if usage := event.get("usage"):
            sample.prompt_tokens = usage["prompt_tokens"]
            sample.output_tokens = usage["completion_tokens"]
        choice = (event.get("choices") or [{}])[0]
        sample.timeline += choice.get("epd", event.get("epd", {})).get("timeline", [])
        now_s = time.perf_counter()
        if choice.get("finish_reason"):
            self._finished_s = now_s
        if not _has_token(choice):
            return
        if self._last_s:
            sample.gaps_s.append(now_s - self._last_s)
        else:
            sample.ttft_s = now_s - self._began_s
        self._last_s = now_s


def _has_token(choice: dict[str, Any]) -> bool:
    """A chunk of text; also an empty one, for a token whose text waits for the next.

    Not the chunk of the role alone, nor that of the end alone.
    """
    delta = choice.get("delta") or {}
    if delta.get("content"):
        return True
    return delta.get("content") == "" and "role" not in delta and not choice.get("finish_reason")


@asynccontextmanager
async def connected(base_url: str, timeout_s: float) -> AsyncIterator[Server]:
    """A server that answers; the key is the environment's.  Raises ServerError."""
    import aiohttp

    key = next(iter(api_keys(Settings())), "")
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=1 << 20,
    ) as session:
        server = Server(session, base_url)
        await server.connect()
        yield server


class Answerer(Protocol[T_contra]):
    """Who answers: a `Server`, or what stands for one."""

    async def ask(self, body: T_contra, zero_s: float) -> Sample: ...


async def send_all(
    server: Answerer[T],
    requests: Sequence[T],
    arrival: Arrival,
    zero_s: float,
    done: Callable[[Sample], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """All of one stream; samples in the order in which they were sent."""
    if isinstance(arrival, Closed):
        return await _closed(server, requests, arrival, zero_s, done)
    draw = random.Random(f"arrivals {arrival}")

    async def one(body: T) -> Sample:
        sample = await server.ask(body, zero_s)
        done(sample)
        return sample

    tasks: list[asyncio.Task[Sample]] = []
    due_s = zero_s
    for index, body in enumerate(requests):
        if isinstance(arrival, Poisson):
            due_s += draw.expovariate(arrival.per_s)
        elif index and index % arrival.size == 0:
            due_s += arrival.every_s
        await asyncio.sleep(due_s - clock())
        tasks.append(asyncio.create_task(one(body)))
    return list(await asyncio.gather(*tasks))


async def _closed(
    server: Answerer[T],
    requests: Sequence[T],
    arrival: Closed,
    zero_s: float,
    done: Callable[[Sample], None],
) -> list[Sample]:
    waiting = iter(enumerate(requests))
    found: dict[int, Sample] = {}

    async def user() -> None:
        for index, body in waiting:
            found[index] = await server.ask(body, zero_s)
            done(found[index])

    await asyncio.gather(*(user() for _ in range(min(arrival.concurrency, len(requests)))))
    return [found[index] for index in sorted(found)]
