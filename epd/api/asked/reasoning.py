"""An answer's reasoning apart from its text, for models that mark it (`--reasoning-parser`).

One form is read, that of Qwen3: reasoning stands between `<think>` and `</think>`, ahead of the
answer.  The prompt shows where it begins: some templates write the opening mark, and some both
marks to turn reasoning off.  After any other prompt the model may begin with it.  So nothing is
guessed from an answer that has only one mark or none.  Line breaks around the marks belong to
neither side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from epd.api.asked.stop import overlap

OPEN, CLOSE = "<think>", "</think>"


class Place(Enum):
    AHEAD = auto()  # reasoning may begin
    INSIDE = auto()
    WITHIN = auto()  # inside, and some of it has been said
    BEHIND = auto()  # nothing but the answer follows


def place_of(parser: str, prompt: str, begun: str = "") -> Place:
    """Where an answer to this prompt begins; `parser`: a value of `model.reasoning_parser`.

    `begun`: what of the answer the prompt holds already.
    """
    end = prompt.rstrip()
    if not parser or end.endswith(CLOSE):
        return Place.BEHIND
    if end.endswith(OPEN):
        return Place.INSIDE
    if not begun.strip():
        return Place.AHEAD
    return Place.WITHIN if begun.rfind(OPEN) > begun.rfind(CLOSE) else Place.BEHIND


@dataclass(slots=True)
class ReasoningParser:
    """Splits a stream of text; both parts come out as they grow."""

    place: Place
    _held: str = ""
    _is_start: bool = True  # of the part that is being said: line breaks are left out

    def __post_init__(self) -> None:
        if self.place is Place.WITHIN:
            self.place, self._is_start = Place.INSIDE, False

    @property
    def num_held(self) -> int:
        """Characters that may yet be a mark, or break a line ahead of one."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and text that cannot change any more."""
        self._held += text
        if self.place is Place.AHEAD:
            begun = self._held.lstrip()
            if OPEN.startswith(begun):  # nothing yet, too
                return "", ""
            if begun.startswith(OPEN):
                self._held, self.place = begun.removeprefix(OPEN), Place.INSIDE
            else:
                self.place, self._is_start = Place.BEHIND, False
        reasoning = self._inside() if self.place is Place.INSIDE else ""
        return reasoning, self._behind() if self.place is Place.BEHIND else ""

    def finish(self) -> tuple[str, str]:
        """No more text: what was held back is no mark."""
        held, self._held = self._held, ""
        if self.place is Place.INSIDE:
            return held.rstrip("\n"), ""
        return "", held

    def _inside(self) -> str:
        said, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._held, self.place = rest, Place.BEHIND
        else:
            said = said[: len(said) - overlap(said, CLOSE)].rstrip("\n")
            self._held = self._held[len(said) :]
        said = self._begun(said.rstrip("\n"))
        self._is_start = self._is_start or bool(closed)
        return said

    def _behind(self) -> str:
        said, self._held = self._begun(self._held), ""
        return said

    def _begun(self, said: str) -> str:
        if self._is_start:
            said = said.lstrip("\n")
            self._is_start = not said
        return said
