"""A question to a server, as a person asks it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """`images`, `videos`: paths of files, http(s) URLs or data URLs, in the order that is meant.

    `seed` None lets the gateway draw one.
    """

    text: str
    images: tuple[str, ...] = ()
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    videos: tuple[str, ...] = ()
