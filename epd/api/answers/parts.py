"""An answer as a list of parts, each of one kind: reasoning, text, or one call.

APIs that number the parts of an answer send three things of each: its beginning, its content, and
that it is complete.  A whole answer is the same parts when all of them are complete.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from epd.api.answers.answer import NO_EXTRAS, Answer, AnswerFacts, Extras
from epd.api.answers.choice import Choice, Delta
from epd.api.answers.placing import Placed
from epd.api.asked.asked import Asked
from epd.api.asked.tools import CallPiece
from epd.frontend import JsonObject
from epd.messages import TokenLogprobs

_json = msgspec.json.Encoder().encode


class Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class AnswerPart:
    """A stretch of the answer; `text` of a call is its arguments' JSON."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    call_index: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_whole: bool = False  # closed, and not because no more tokens were allowed


class PartsAnswer(Answer):
    """Of one choice; makes an object of its parts, or events as they grow."""

    tells_reasoning = True

    def __init__(self, facts: AnswerFacts, asked: Asked) -> None:
        super().__init__(facts, asked)
        self._parts: list[AnswerPart] = []
        self._open: AnswerPart | None = None
        self._num_chars = 0  # of its text so far
        self._placed: deque[Placed] = deque()  # ahead of the text beside which they stand
        self._extras: JsonObject = {}

    def whole(self, choices: Sequence[tuple[Choice, Delta]], extras: Extras = NO_EXTRAS) -> bytes:
        ((choice, delta),) = choices
        for _ in self._grow(delta):
            pass
        self._extras = extras.of([choice])
        return _json(self._complete(choice))

    def events(self, choice: Choice, delta: Delta, extras: Extras = NO_EXTRAS) -> bytes:
        said = b"".join(self._grow(delta))
        if delta.finish_reason:
            self._extras = extras.of([choice])
        return said

    def end(self, choices: Sequence[Choice]) -> bytes:
        return self._ended(choices[0])

    # --- what differs -----------------------------------------------------------------------------

    @abstractmethod
    def _complete(self, choice: Choice) -> JsonObject:
        """The object of a request that does not stream."""

    @abstractmethod
    def _ended(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def _opened(self, part: AnswerPart) -> bytes: ...

    @abstractmethod
    def _grown(self, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes: ...

    @abstractmethod
    def _closed(self, part: AnswerPart) -> bytes: ...

    # --- how parts grow ---------------------------------------------------------------------------

    def _grow(self, delta: Delta) -> Iterator[bytes]:
        """What the delta does to the parts: each piece of a call stands where its text ends."""
        self._placed += delta.placed
        yield from self._tell(Kind.REASONING, delta.reasoning)
        text = delta.text
        for piece in delta.calls:
            num_ahead = max(0, piece.num_ahead - self._num_chars)
            ahead, text = text[:num_ahead], text[num_ahead:]
            yield from self._tell(Kind.TEXT, ahead)
            if not self._goes_on(piece):
                call = AnswerPart(
                    len(self._parts), Kind.CALL, "", piece.call_id, piece.name, piece.index
                )
                yield from self._begin(call)
            yield from self._add(piece.arguments)
        yield from self._tell(Kind.TEXT, text)
        if delta.finish_reason:
            yield from self._close(is_whole=delta.finish_reason != "length")

    def _tell(self, kind: Kind, text: str) -> Iterator[bytes]:
        if text:
            if self._open is None or self._open.kind is not kind:
                yield from self._begin(AnswerPart(len(self._parts), kind))
            self._num_chars += len(text) * (kind is Kind.TEXT)
            yield from self._add(text, self._placed_ahead() if kind is Kind.TEXT else [])

    def _placed_ahead(self) -> list[TokenLogprobs]:
        """Of the text so far, those that have not been sent."""
        num = sum(at <= self._num_chars for at, _ in self._placed)
        return [self._placed.popleft()[1] for _ in range(num)]

    def _goes_on(self, piece: CallPiece) -> bool:
        return self._open is not None and self._open.call_index == piece.index

    def _begin(self, part: AnswerPart) -> Iterator[bytes]:
        yield from self._close(is_whole=True)
        self._open = part
        self._parts.append(part)
        yield self._opened(part)

    def _add(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[bytes]:
        part = self._open
        assert part is not None
        part.text += text
        part.logprobs += logprobs
        if text:
            yield self._grown(part, text, logprobs)

    def _close(self, *, is_whole: bool) -> Iterator[bytes]:
        part, self._open = self._open, None
        if part is not None:
            part.is_whole = is_whole
            yield self._closed(part)


def event(value: JsonObject) -> bytes:
    """A server-sent event that is named after its type."""
    return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), _json(value))
