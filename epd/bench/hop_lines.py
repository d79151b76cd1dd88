"""Lines of text over pipes, both ways, on the event loop."""

from __future__ import annotations

import asyncio
from typing import IO


class Lines:
    """Reads from one pipe and writes to another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, source: IO[str], sink: IO[str]) -> Lines:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sink)
        return cls(reader, writer)

    async def read(self) -> str | None:
        """The next line, or None at the end."""
        line = await self._reader.readline()
        return line.decode().rstrip("\n") if line else None

    def write(self, line: str) -> None:
        self._writer.write(line.encode() + b"\n")

    def close(self) -> None:
        self._writer.close()
