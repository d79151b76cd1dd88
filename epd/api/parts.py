"""An answer as a list of parts, each of one kind: reasoning, text, or one call.

APIs that number the parts of an answer tell three things of each: that it begins, what it says, and
that it is complete.  A whole answer is the same parts when all of them are complete.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from epd.api.answer import NO_EXTRAS, Answer, Extras, Facts
from epd.api.asked import Asked
from epd.api.choice import Choice, Delta
from epd.api.port import JsonObject
from epd.api.tools import CallPiece
from epd.messages import TokenLogprobs

_json = msgspec.json.Encoder().encode


class Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Part:
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

    def __init__(self, facts: Facts, asked: Asked) -> None:
        super().__init__(facts, asked)
        self._parts: list[Part] = []
        self._open: Part | None = None
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text is held back
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
    def _opened(self, part: Part) -> bytes: ...

    @abstractmethod
    def _grown(self, part: Part, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes: ...

    @abstractmethod
    def _closed(self, part: Part) -> bytes: ...

    # --- how parts grow ---------------------------------------------------------------------------

    def _grow(self, delta: Delta) -> Iterator[bytes]:
        """What the delta does to the parts.  What goes on with an open call comes before text."""
        self._logprobs += delta.logprobs
        calls = list(delta.calls)
        while calls and self._goes_on(calls[0]):
            yield from self._add(calls.pop(0).arguments)
        for kind, text in ((Kind.REASONING, delta.reasoning), (Kind.TEXT, delta.text)):
            if text:
                if self._open is None or self._open.kind is not kind:
                    yield from self._begin(Part(len(self._parts), kind))
                yield from self._add(text)
        for piece in calls:
            if not self._goes_on(piece):
                call = Part(len(self._parts), Kind.CALL, "", piece.call_id, piece.name, piece.index)
                yield from self._begin(call)
            yield from self._add(piece.arguments)
        if delta.finish_reason:
            yield from self._close(is_whole=delta.finish_reason != "length")

    def _goes_on(self, piece: CallPiece) -> bool:
        return self._open is not None and self._open.call_index == piece.index

    def _begin(self, part: Part) -> Iterator[bytes]:
        yield from self._close(is_whole=True)
        self._open = part
        self._parts.append(part)
        yield self._opened(part)

    def _add(self, text: str) -> Iterator[bytes]:
        part = self._open
        assert part is not None
        part.text += text
        logprobs, self._logprobs = self._logprobs, []
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
