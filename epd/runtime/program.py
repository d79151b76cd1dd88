"""A program that is not of this project, and serves beside it: a vLLM server."""

from __future__ import annotations

import msgspec


class ServerCommand(msgspec.Struct, frozen=True):
    """What starts it, and where it answers `/health`."""

    words: tuple[str, ...]
    environment: dict[str, str]  # besides that of who starts it
    url: str
