"""What tests ask, over HTTP: bodies of requests, and many of them at once."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
Body = dict[str, Any]
CLIENT_TIMEOUT_S = 300.0
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Reply:
    """One HTTP response, read to its end."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)
    lasted_s: float = 0.0

    @property
    def text(self) -> str:
        assert self.status == 200, f"{self.status}: {self.body}"
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.body
        return dict(self.body["error"])


def png(image: Any) -> str:
    """A PIL image as a data URL, without loss."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return data_url(buffer.getvalue())


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def question(text: str, *urls: str, **settings: Any) -> Body:
    """A chat request: images first, then a text; greedy unless told otherwise."""
    parts: list[Body] = [image_part(url) for url in urls]
    parts.append({"type": "text", "text": text})
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0} | settings


async def post(
    session: aiohttp.ClientSession,
    base_url: str,
    body: Body,
    path: str = "/v1/chat/completions",
    **headers: str,
) -> Reply:
    """`headers`: with underscores for hyphens."""
    began_s = time.monotonic()
    every = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    data = io.BytesIO(json.dumps(body).encode())  # aiohttp warns of large bodies in one piece
    async with session.post(base_url + path, data=data, headers=every) as response:
        is_json = response.content_type == "application/json"
        content = await response.json() if is_json else await response.text()
        return Reply(response.status, content, dict(response.headers), time.monotonic() - began_s)


async def post_all(base_url: str, bodies: Sequence[Body], **headers: str) -> list[Reply]:
    """All at once; replies in the order of `bodies`."""

    async def work(session: aiohttp.ClientSession) -> list[Reply]:
        return await asyncio.gather(*(post(session, base_url, body, **headers) for body in bodies))

    return await in_session(work)


async def in_session(work: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    """`work` with a session without a limit of connections, closed afterwards."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await work(session)
