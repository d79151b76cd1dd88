"""What calls look like in the text of a family of models, as data.

A call stands between two marks.  Behind the first comes a head with the function's name, then the
arguments in the family's writing, which a reader turns into JSON as they come.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from epd.api.asked.calls.json_walk import JsonWalk

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"


class Arguments(Protocol):
    """Reads the arguments of one call."""

    is_done: bool

    @property
    def is_broken(self) -> bool:
        """What comes are no arguments."""

    def read(self, held: str) -> tuple[int, str]:
        """How many characters it takes of what is held; the JSON that they are."""

    def closing(self) -> str:
        """What makes it JSON, where it is broken and can be made."""


class JsonArguments:
    """JSON as it grows.  `depth`: how many brackets stand around it, which end behind it."""

    def __init__(self, depth: int = 0) -> None:
        self.is_done = False
        self._depth = depth
        self._is_told = False
        self._walk = JsonWalk(depth)

    @property
    def is_broken(self) -> bool:
        return self._walk.is_broken

    def read(self, held: str) -> tuple[int, str]:
        told = ""
        if not self._is_told:
            end = self._walk.end(held, 0, self._depth)
            if self.is_broken:
                return self._walk.broken_at, held[: self._walk.broken_at]
            if end < 0:
                return len(held), held
            self._is_told, told = True, held[:end]
            if not self._depth:
                self.is_done = True
                return end, told
        end = self._walk.end(held, len(told), depth=0)
        self.is_done = end >= 0
        if self.is_broken:
            return self._walk.broken_at, told
        return len(held) if end < 0 else end, told

    def closing(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Form:
    """Of a family's calls.  `arguments` makes a reader, given the schema of the function's
    parameters.  `head` leads to it and has groups `name` and perhaps `id`."""

    open: str
    close: str  # empty: a call ends with its arguments
    head: re.Pattern[str]
    arguments: Callable[[object], Arguments]
    around: tuple[str, ...] = ()  # marks around calls, which are no text
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    def is_within(self, text: str) -> bool:
        """Whether it ends inside of a call."""
        closed = text.rfind(self.close) if self.close else -1
        return text.rfind(self.open) > closed
