"""What a black-box row asks of one server, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

PATH = "/v1/chat/completions"
MAX_TOKENS = 24
REASON = 120  # characters of an error that a cell keeps

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` 0: no answer, and `text` is why."""

    status: int
    text: str  # of the answer, or of the error

    def judged(self, wanted: str) -> str:
        """`right`, `WRONG`, a status, or why there is none."""
        if self.status == 200:
            return "right" if self.text == wanted else "WRONG"
        return str(self.status) if self.status else self.text


@dataclass(slots=True)
class TruthCell:
    """Outcomes of one row at one server, counted; or why it was skipped."""

    counts: Counter[str] = field(default_factory=Counter)
    then: str = ""  # of a good request behind it
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{told}; then {self.then}" if self.then else told

    def as_json(self) -> Json:
        return {"counts": dict(self.counts), "then": self.then, "skipped": self.skipped}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(url: str, uuid: str = "") -> Json:
    part: Json = {"type": "image_url", "image_url": {"url": url}}
    return part | {"uuid": uuid} if uuid else part


class Peer:
    """One server that is asked: a column of the table."""

    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self.name, self.url = name, url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def open(self) -> None:
        """Raises OSError where nobody answers."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        try:
            async with self._session.get(f"{self.url}/v1/models") as answer:
                self._model = (await answer.json())["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, LookupError) as error:
            raise OSError(f"{self.name} at {self.url} lists no model: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, text: str, parts: Sequence[Json] = (), *, hang_up_s: float = 0.0) -> Reply:
        """`hang_up_s`: leave after so long, if it is not 0."""
        assert self._session is not None
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        try:
            async with asyncio.timeout(hang_up_s or None):
                async with self._session.post(self.url + PATH, json=body) as answer:
                    return _reply(answer.status, await answer.text())
        except TimeoutError:
            return Reply(0, "left" if hang_up_s else "no answer in time")
        except aiohttp.ClientError as error:
            return Reply(0, f"cut: {type(error).__name__}")


def _reply(status: int, text: str) -> Reply:
    if status != 200:
        return Reply(status, text[:REASON])
    try:
        return Reply(200, str(json.loads(text)["choices"][0]["message"]["content"]))
    except (ValueError, LookupError, TypeError):
        return Reply(0, "an answer without a message")
