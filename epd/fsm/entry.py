"""One line of a machine's story."""

from __future__ import annotations

from typing import NamedTuple


class StoryEntry(NamedTuple):
    """What moved a machine from where to where; an event that repeats in one state is counted."""

    at_s: float
    source: str
    event: str
    target: str
    times: int = 1

    def __str__(self) -> str:
        repeated = f" x{self.times}" if self.times > 1 else ""
        return f"{self.source} -{self.event}@{self.at_s:.3f}{repeated}-> {self.target}"
