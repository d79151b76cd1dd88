"""Stop strings over a stream: text is held back while it may still become one.

The text before the first stop string is the answer; the stop string itself is not (OpenAI's rule).
What is held back is the longest suffix that begins some stop string, so a client sees everything
that can no longer change, at once, however the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One stream's matcher."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """More text: what is certain now, and whether a stop string has been found."""
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.stopped = "", True
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """No more text comes: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
