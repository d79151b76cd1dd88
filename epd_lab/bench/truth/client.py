"""What a black-box row asks of one server, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from epd_lab.bench.truth.cluster import TruthCluster

PATH = "/v1/chat/completions"
MAX_TOKENS = 24
STREAM_TOKENS = 120
REASON = 120  # characters of an error that a cell keeps

Json = dict[str, object]
Read = Callable[[aiohttp.ClientResponse], Awaitable["Reply"]]


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` 0: no answer, and `text` is why."""

    status: int
    text: str  # of the answer, or of the error
    seconds: float = 0.0

    def judged(self, wanted: str | None) -> str:
        """`right`, `WRONG`, a status, or why there is none; `ANSWERED`: nothing was right."""
        if self.status == 200 and wanted is None:
            return "ANSWERED"
        if self.status == 200:
            return "right" if self.text == wanted else "WRONG"
        return str(self.status) if self.status else self.text


@dataclass(slots=True)
class TruthCell:
    """Outcomes of one row at one server, counted; or why it was skipped."""

    counts: Counter[str] = field(default_factory=Counter)
    then: str = ""  # of a good request behind it
    memory: str = ""  # whether it came back
    skipped: str = ""
    slowest_s: float = 0.0

    def add(self, reply: Reply, wanted: str | None) -> None:
        self.counts[reply.judged(wanted)] += 1
        self.slowest_s = max(self.slowest_s, round(reply.seconds, 2))

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return "; ".join(filter(None, (told, self.then and f"then {self.then}", self.memory)))

    def as_json(self) -> Json:
        found = {"text": str(self), "counts": dict(self.counts), "slowest_s": self.slowest_s}
        return {"text": str(self)} if self.skipped else found


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(url: str, uuid: str = "") -> Json:
    part: Json = {"type": "image_url", "image_url": {"url": url}}
    return part | {"uuid": uuid} if uuid else part


class Peer:
    """One server that is asked: a column of the table."""

    def __init__(
        self, name: str, url: str, timeout_s: float, cluster: TruthCluster | None = None
    ) -> None:
        """`cluster`: of its processes, if they were started here."""
        self.name, self.url = name, url.rstrip("/")
        self.cluster = cluster or TruthCluster()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self.model = ""

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    async def open(self) -> None:
        """Raises OSError where nobody answers."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        try:
            async with self.session.get(f"{self.url}/v1/models") as answer:
                self.model = (await answer.json())["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, LookupError) as error:
            raise OSError(f"{self.name} at {self.url} lists no model: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, text: str, parts: Sequence[Json] = (), *, hang_up_s: float = 0.0, url: str = ""
    ) -> Reply:
        """`hang_up_s`: leave after so long, if it is not 0.  `url`: of another of its servers."""
        body = self.body(text, parts) | {"max_tokens": MAX_TOKENS}
        return await self.send((url or self.url) + PATH, body, _whole, hang_up_s)

    async def stream(
        self,
        text: str,
        parts: Sequence[Json],
        on_piece: Callable[[int], None] = lambda count: None,
        leave_at: int = 0,
    ) -> Reply:
        """`on_piece` gets the number of pieces so far; `leave_at`: hang up at so many."""

        async def read(answer: aiohttp.ClientResponse) -> Reply:
            pieces: list[str] = []
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return Reply(200, "".join(pieces))
                if not data.startswith(b"{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    return Reply(0, "cut: an error event")
                pieces += [one["delta"].get("content") or "" for one in event["choices"]]
                on_piece(len(pieces))
                if 0 < leave_at <= len(pieces):
                    return Reply(0, "left")
            return Reply(0, "cut: no end")

        more = {"stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        return await self.send(self.url + PATH, self.body(text, parts) | more, read)

    def body(self, text: str, parts: Sequence[Json]) -> Json:
        content = [*parts, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "temperature": 0}

    async def send(self, url: str, body: Json, read: Read, hang_up_s: float = 0.0) -> Reply:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with (
                asyncio.timeout(hang_up_s or None),
                self.session.post(url, json=body) as answer,
            ):
                is_good = answer.status == 200
                reply = await read(answer) if is_good else await _refusal(answer)
        except TimeoutError:
            reply = Reply(0, "left" if hang_up_s else "no answer in time")
        except aiohttp.ClientError as error:
            reply = Reply(0, f"cut: {type(error).__name__}")
        return replace(reply, seconds=loop.time() - began_s)


async def _refusal(answer: aiohttp.ClientResponse) -> Reply:
    return Reply(answer.status, (await answer.text())[:REASON])


async def _whole(answer: aiohttp.ClientResponse) -> Reply:
    try:
        return Reply(200, str((await answer.json())["choices"][0]["message"]["content"]))
    except (ValueError, LookupError, TypeError):
        return Reply(0, "an answer without a message")
