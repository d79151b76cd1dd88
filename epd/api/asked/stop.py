"""Stop strings over a stream: text is held back while it may still become one.

The text before the first stop string is the answer; the stop string itself is not (OpenAI's rule).
The first is the one that is complete first; of two that end together, the longer.  So the answer
does not depend on how the text was cut into pieces.  What is held back is the longest suffix that
begins some stop string: a client sees everything that can no longer change, at once.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One stream's matcher."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = ""  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """More text: what is certain now, and whether a stop string has been found."""
        if not self._stops:
            return text, False
        if self.found:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start], True
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """No more text comes: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
