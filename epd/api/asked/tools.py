"""Tool calls: what a client offers, what a model must or may call, and calls found in its text.

The model's own chat template shows the tools to the model, and decides what a call looks like.  One
form is read, that of Hermes and Qwen: a JSON object between `<tool_call>` and `</tool_call>`.  A
template that shows no tools, or writes calls in another form, refuses them, rather than to let a
call pass as text.

A call that is asked for (`required`, or one function by name) is enforced by a grammar: it is valid
against the function's parameters, whatever the model is.  A call that is free (`auto`) is parsed; a
text that looks like a call and is none stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Required, TypedDict

from epd.api.asked.json_walk import JsonWalk
from epd.api.asked.stop import overlap
from epd.api.asked.structured import Constraint
from epd.frontend import JsonObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Function(TypedDict, total=False):
    """As OpenAI writes it."""

    name: Required[str]
    description: str | None
    parameters: JsonObject | None
    strict: bool | None


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request; with `forced` names the answer is calls of these and nothing else."""

    tools: tuple[Tool, ...]
    forced: tuple[str, ...] = ()
    parallel: bool = True
    is_named: bool = False  # one function by name: OpenAI ends such an answer with "stop"
    otherwise: Constraint | None = None  # what an answer is that calls nothing

    @property
    def is_shaped(self) -> bool:
        """Whether a grammar bounds the answer."""
        return bool(self.forced or self.otherwise)


# --- the answer -----------------------------------------------------------------------------------


@dataclass(slots=True)
class CallPiece:
    """A piece of one call: its first has id and name, each has a part of the arguments' JSON."""

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""
    num_ahead: int = 0  # characters of the answer's text, from its beginning

    def delta(self) -> JsonObject:
        """As OpenAI streams it."""
        function = {"arguments": self.arguments}
        if not self.name:
            return {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return {"index": self.index, "id": self.call_id, "type": "function", "function": function}


def merged(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """One piece for each call: clients take a delta's entries for different calls."""
    whole: list[CallPiece] = []
    for piece in pieces:
        if whole and whole[-1].index == piece.index:
            whole[-1].arguments += piece.arguments
        else:
            whole.append(piece)
    return whole


def whole_calls(pieces: Sequence[CallPiece]) -> list[JsonObject]:
    """As OpenAI puts them into a message."""
    whole: list[CallPiece] = []
    for piece in pieces:
        if piece.name:
            whole.append(replace(piece))
        else:
            whole[-1].arguments += piece.arguments
    return [{k: v for k, v in call.delta().items() if k != "index"} for call in whole]


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(slots=True)
class CallParser:
    """Splits a stream of text into text and calls; calls come out as they grow.

    A call's end is where its JSON ends (`json_walk`): marks in an argument are part of it.  Only of
    what is no JSON the next mark is the end.
    """

    names: frozenset[str]
    limit: int = 0  # of calls; 0: none
    is_forced: bool = False  # there is nothing but calls: one that was cut short is no text
    num_calls: int = 0
    done: bool = False  # the limit is reached: what follows is nothing
    _held: str = ""
    _walk: JsonWalk | None = None  # inside of a call
    _walked: int = 0  # of what is held
    _end: int = -1  # of the call's JSON in what is held
    _streaming: bool = False  # the head of the present call is out
    _is_said: bool = False  # and all of its arguments
    _after_call: bool = False  # and nothing has been said since
    _pieces: list[CallPiece] = field(default_factory=list)
    _shown: list[str] = field(default_factory=list)
    _num_shown: int = 0  # characters of all its text so far

    @property
    def num_held(self) -> int:
        """Characters that may yet be text."""
        return len(self._held) + (len(OPEN) if self._walk and not self._streaming else 0)

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Text and pieces that cannot change any more."""
        self._held += text
        while not self.done and (self._inside() if self._walk else self._outside()):
            pass
        if self.done:
            self._held = ""
        pieces, self._pieces = self._pieces, []
        shown, self._shown = "".join(self._shown), []
        return shown, merged(pieces)

    def finish(self) -> str:
        """No more text: a call that was not closed is text, unless its pieces are out."""
        held, self._held = self._held, ""
        if self.is_forced:
            return ""
        if self._walk:
            return "" if self._streaming else OPEN + held
        return self._between(held)

    def _between(self, text: str) -> str:
        """Text outside of calls; after a call without the line breaks around it."""
        if self._after_call:
            text = text.lstrip("\n")
            self._after_call = not text
        return text.rstrip("\n") if self.num_calls else text

    def _show(self, text: str) -> None:
        self._shown.append(text)
        self._num_shown += len(text)

    def _outside(self) -> bool:
        """Look for the next call; False when more text is needed."""
        before, found, rest = self._held.partition(OPEN)
        if not found:
            sure = self._held[: len(self._held) - overlap(self._held, OPEN)]
            if self.num_calls:
                sure = sure.rstrip("\n")  # they may stand before a call
            self._show(self._between(sure))
            self._held = self._held[len(sure) :]
            return False
        self._show(self._between(before))
        self._held, self._walk, self._walked, self._end = rest, JsonWalk(), 0, -1
        self._streaming = self._is_said = False
        return True

    def _inside(self) -> bool:
        """Take one part off what is held of a call; False when more text is needed."""
        walk, held = self._walk, self._held
        assert walk is not None
        if not self._streaming:
            if (head := _HEAD.match(held)) and head[1] in self.names:
                self._begin(head[1], "")
                self._held, self._walk, self._walked = held[head.end() :], JsonWalk(depth=1), 0
                return True
            walk.is_broken |= held.lstrip()[:1] not in ("", "{")
        if walk.is_broken or self._end >= 0:
            return self._close(walk)
        if self._streaming and not self._is_said:
            end = walk.end(held, 0, depth=1)
            if not walk.is_broken:
                self._is_said = end >= 0
                self._say(held[:end] if self._is_said else held)
                self._held = held[end:] if self._is_said else ""
            return self._is_said or walk.is_broken
        self._end = walk.end(held, self._walked, depth=0)
        self._walked = len(held)
        return self._end >= 0 or walk.is_broken

    def _close(self, walk: JsonWalk) -> bool:
        """The mark behind the JSON, or the next one if there is no JSON."""
        is_growing = self._streaming and not self._is_said
        at = self._held.find(CLOSE, max(self._end, 0))
        if at < 0:
            if is_growing:  # but for what may be the end of the object around the arguments
                sure = self._held[: len(self._held) - overlap(self._held, CLOSE)].rstrip("} \n\t")
                self._say(sure)
                self._held = self._held[len(sure) :]
            return False
        body, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        if is_growing:
            self._say(body.rstrip().removesuffix("}").rstrip())
        elif not self._streaming:
            self._read(body)
        self._walk, self._after_call = None, True
        self.done = 0 < self.limit <= self.num_calls
        return True

    def _begin(self, name: str, arguments: str) -> None:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._pieces.append(CallPiece(self.num_calls, arguments, call_id, name, self._num_shown))
        self.num_calls += 1
        self._streaming = True

    def _say(self, arguments: str) -> None:
        if arguments:
            piece = CallPiece(self.num_calls - 1, arguments, num_ahead=self._num_shown)
            self._pieces.append(piece)

    def _read(self, body: str) -> None:
        """A call whose keys come in another order, or text that looks like a call."""
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            name, arguments = "", {}
        if name in self.names and isinstance(arguments, dict):
            self._begin(name, json.dumps(arguments, ensure_ascii=False))
        else:
            self._show(f"{OPEN}{body}{CLOSE}")
