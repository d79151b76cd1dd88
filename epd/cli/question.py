"""A question to a server, as a person asks it."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.cli.boundary import CommandFailed


@dataclass(frozen=True, slots=True)
class Sampling:
    """`seed` None lets the gateway draw one."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return found if self.seed is None else {**found, "seed": self.seed}


def user_message(
    text: str, images: Sequence[str] = (), videos: Sequence[str] = ()
) -> dict[str, Any]:
    """`images`, `videos`: files, http(s) URLs or data URLs, in the order that is meant."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _as_url(image)}} for image in images
    ]
    content += [{"type": "video_url", "video_url": {"url": _as_url(video)}} for video in videos]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def check_files(kind: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names, all of which are URLs or readable files.  Raises CommandFailed."""
    for name in names:
        if not _is_url(name) and not Path(name).is_file():
            raise CommandFailed(f"{kind} {name} does not exist; give a file or an http(s) URL")
    return tuple(names)


def _is_url(medium: str) -> bool:
    return medium.startswith(("http://", "https://", "data:"))


def _as_url(medium: str) -> str:
    if _is_url(medium):
        return medium
    kind = mimetypes.guess_type(medium)[0] or "application/octet-stream"
    return f"data:{kind};base64," + base64.b64encode(Path(medium).read_bytes()).decode()
