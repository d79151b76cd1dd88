"""An HTTP client that sends what it is told, byte for byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from epd.api.server import ApiServer
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def request(
    body: bytes | dict[str, Any] = b"", *, method: str = "POST", path: str = CHAT, **headers: str
) -> bytes:
    """A request's bytes; header names with _ for -."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    fields = {"content_type": "application/json", "content_length": str(len(data)), **headers}
    lines = [f"{method} {path} HTTP/1.1", "host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Wire:
    """One connection; dropped at the end of its test if not before."""

    opened: ClassVar[list[Wire]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, server: ApiServer) -> Wire:
        wire = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        cls.opened.append(wire)
        return wire

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(PATIENCE_S):
            raw = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = raw.rstrip().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(PATIENCE_S):
            if "content-length" in headers:
                return (
                    status,
                    headers,
                    await self.reader.readexactly(int(headers["content-length"])),
                )
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        return status, headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def drop(self) -> None:
        self.writer.transport.abort()


async def exchange(server: ApiServer, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    wire = await Wire.to(server)
    wire.writer.write(raw)
    return await wire.answer()


async def refused(server: ApiServer, raw: bytes, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status, in OpenAI's format."""
    found, headers, body = await exchange(server, raw)
    assert found == status, body
    assert headers["content-type"] == "application/json"
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def is_well(server: ApiServer) -> bool:
    """A healthy neighbour gets its answer."""
    status, _, body = await exchange(server, request(HI))
    return status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "hello"


async def until(condition: Any, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
