"""A question to a server, as a person asks it."""

from __future__ import annotations

import base64
import mimetypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.cli.boundary import CommandFailed
from epd.tiny import RECEIPT, SAMPLES

MAX_PIPED_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AskSampling:
    """`seed` None lets the gateway draw one."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return found if self.seed is None else {**found, "seed": self.seed}


def read_piped(fd: int = 0) -> str:
    """The text on stdin, for `-`.  Raises CommandFailed, also at a terminal, and if it is no
    text."""
    if os.isatty(fd):
        raise CommandFailed(
            "- stands for text from a pipe or a file, and stdin is a terminal; write the question "
            "itself, or use epd chat"
        )
    try:
        with os.fdopen(fd, "rb", closefd=False) as pipe:
            data = pipe.read(MAX_PIPED_NBYTES + 1)
    except OSError as error:
        raise CommandFailed(f"stdin cannot be read: {error.strerror}") from None
    if len(data) > MAX_PIPED_NBYTES:
        raise CommandFailed(f"stdin holds more than {MAX_PIPED_NBYTES >> 20} MiB; send less text")
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CommandFailed(
            f"stdin is no text in UTF-8 (byte {error.start}); a picture goes with --image FILE"
        ) from None
    if "\0" in text:
        raise CommandFailed("stdin is no text: it holds zero bytes; send text in UTF-8")
    if not text:
        raise CommandFailed("stdin is empty; pipe the question, or write it in place of -")
    return text


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
            raise CommandFailed(
                f"{kind} {name} does not exist; give a file or an http(s) URL{_sample(kind)}"
            )
    return tuple(names)


def _sample(kind: str) -> str:
    """A picture that is always there."""
    return f", such as {SAMPLES / RECEIPT}" if kind == "image" else ""


def _is_url(medium: str) -> bool:
    return medium.startswith(("http://", "https://", "data:"))


def _as_url(medium: str) -> str:
    if _is_url(medium):
        return medium
    kind = mimetypes.guess_type(medium)[0] or "application/octet-stream"
    return f"data:{kind};base64," + base64.b64encode(Path(medium).read_bytes()).decode()
