"""An answer's reasoning apart from its text, for models that mark it (`--reasoning-parser`).

It stands between two marks of the family (`calls.registry`), ahead of the answer.  The prompt shows
where it begins: some templates write the opening mark, and some both marks to turn reasoning off.
After any other prompt the model may begin with it.  So nothing is guessed from an answer that has
only one mark or none.  Line breaks around the marks belong to neither side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from epd.api.asked.calls.registry import REASONING, THINK, Reasoning
from epd.api.asked.stop import overlap


class Place(Enum):
    AHEAD = auto()  # reasoning may begin
    INSIDE = auto()
    WITHIN = auto()  # inside, and some of it has been said
    BEHIND = auto()  # nothing but the answer follows


def place_of(parser: str, prompt: str, begun: str = "") -> Place:
    """Where an answer to this prompt begins; `parser`: a value of `model.reasoning_parser`.

    `begun`: what of the answer the prompt holds already.
    """
    end, marks = prompt.rstrip(), REASONING.get(parser)
    if marks is None or end.endswith(marks.close):
        return Place.BEHIND
    if end.endswith(marks.open):
        return Place.INSIDE
    if not begun.strip():
        return Place.AHEAD
    is_within = begun.rfind(marks.open) > begun.rfind(marks.close)
    return Place.WITHIN if is_within else Place.BEHIND


@dataclass(slots=True)
class ReasoningParser:
    """Splits a stream of text; both parts come out as they grow."""

    place: Place
    marks: Reasoning = THINK
    _held: str = ""
    _is_start: bool = True  # of the part that is being said: line breaks are left out
    _is_marked: bool = False  # the answer has marks of its own

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
            if self.marks.open.startswith(begun):  # nothing yet, too
                return "", ""
            if begun.startswith(self.marks.open):
                self._held, self.place = begun.removeprefix(self.marks.open), Place.INSIDE
            else:
                self.place, self._is_start = Place.BEHIND, False
        reasoning = self._inside() if self.place is Place.INSIDE else ""
        return reasoning, self._behind() if self.place is Place.BEHIND else ""

    def finish(self) -> tuple[str, str]:
        """No more text: what was held back is no mark."""
        held, self._held = self._held, ""
        if self.place is Place.INSIDE:
            return held.rstrip("\n"), ""
        if self._is_marked:
            held = self._unmarked(held, is_whole=True)
        return "", self._begun(held) if self.place is Place.BEHIND else held

    def _inside(self) -> str:
        said, closed, rest = self._held.partition(self.marks.close)
        if closed:
            self._held, self.place = rest, Place.BEHIND
        else:
            said = said[: len(said) - overlap(said, self.marks.close)].rstrip("\n")
            self._held = self._held[len(said) :]
        said = self._begun(said.rstrip("\n"))
        self._is_start = self._is_start or bool(closed)
        return said

    def _behind(self) -> str:
        if self._is_start and self.marks.answer is not None and not self._is_marked:
            mark, begun = self.marks.answer[0], self._held.lstrip("\n")
            if mark.startswith(begun):
                return ""
            self._is_marked = begun.startswith(mark)
            self._held = begun.removeprefix(mark)
        sure = self._unmarked(self._held) if self._is_marked else self._held
        self._held = self._held[len(sure) :]
        return self._begun(sure)

    def _unmarked(self, text: str, *, is_whole: bool = False) -> str:
        """Without the mark at its end, or what may become that, and line breaks ahead of it."""
        assert self.marks.answer is not None  # else none is found
        mark, ended = self.marks.answer[1], text.rstrip()
        if ended.endswith(mark):
            return ended.removesuffix(mark).rstrip("\n")
        return text if is_whole else text[: len(text) - overlap(text, mark)].rstrip("\n")

    def _begun(self, said: str) -> str:
        if self._is_start:
            said = said.lstrip("\n")
            self._is_start = not said
        return said
