"""What was not let in, in the log: now and then, by kind, type and source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

SAY_EVERY_S = 10.0
MAX_SOURCES = 64  # that are told apart between two lines; a sender can choose its name


class DropLog:
    """A line at once, then one for all that came in `SAY_EVERY_S`: a flood costs no more."""

    def __init__(self, say: Callable[..., None], now_s: Callable[[], float]) -> None:
        self._say = say
        self._now_s = now_s
        self._next_s = 0.0
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def note(self, kind: str, message: str, source: str, detail: str = "") -> None:
        what = (kind, message, source)
        if len(self._counts) >= MAX_SOURCES and what not in self._counts:
            what = (kind, message, "others")
        self._counts[what] += 1
        if (now_s := self._now_s()) < self._next_s:
            return
        self._next_s = now_s + SAY_EVERY_S
        told = "; ".join(
            f"{count} {message or 'message'} of {source or 'nobody'!r}: {kind}"
            for (kind, message, source), count in self._counts.items()
        )
        self._counts.clear()
        self._say("messages were dropped", what=told, last=detail)
