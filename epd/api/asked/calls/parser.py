"""Splits the text of an answer into text and calls, however it was cut into pieces.

A call's end is looked for behind its arguments: marks in an argument are part of it (F72).  What
looks like a call and is none (an unknown name, broken arguments) stays text, up to the next mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.api.asked.calls import hermes
from epd.api.asked.calls.form import Arguments, Form, JsonArguments
from epd.api.asked.calls.json_walk import JsonWalk
from epd.api.asked.stop import overlap
from epd.api.asked.tools import CallPiece, merged


@dataclass(slots=True)
class CallParser:
    """Of one answer; calls come out as they grow."""

    functions: Mapping[str, object]  # the schemas of their parameters, by name
    limit: int = 0  # of calls; 0: none
    is_forced: bool = False  # there is nothing but calls: one that was cut short is no text
    form: Form = hermes.FORM
    num_calls: int = 0
    done: bool = False  # the limit is reached: what follows is nothing
    _held: str = ""
    _walk: JsonWalk | None = None  # inside of a call, where no head has been read
    _walked: int = 0  # of what is held
    _end: int = -1  # of the call's JSON in what is held
    _arguments: Arguments | None = None  # of a call whose head is out
    _after_call: bool = False  # and nothing has been said since
    _pieces: list[CallPiece] = field(default_factory=list)
    _shown: list[str] = field(default_factory=list)
    _num_shown: int = 0  # characters of all its text so far

    @property
    def num_held(self) -> int:
        """Characters that may yet be text."""
        return len(self._held) + (len(self.form.open) if self._walk else 0)

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Text and pieces that cannot change any more."""
        self._held += text
        while not self.done and self._goes_on():
            pass
        if self.done:
            self._held = ""
        pieces, self._pieces = self._pieces, []
        shown, self._shown = "".join(self._shown), []
        return shown, merged(pieces)

    def finish(self) -> str:
        """No more text: a call that was not closed is text, unless its pieces are out."""
        held, self._held = self._held, ""
        if self.is_forced or self._arguments is not None:
            return ""
        return self.form.open + held if self._walk else self._between(held)

    def _goes_on(self) -> bool:
        """Take one part off what is held; False when more text is needed."""
        if self._arguments is not None:
            return self._inside(self._arguments)
        return self._unbegun(self._walk) if self._walk is not None else self._outside()

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
        """Look for the next mark."""
        marks = (self.form.open, *self.form.around)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            kept = max(overlap(self._held, mark) for mark in marks)
            sure = self._held[: len(self._held) - kept]
            if self.num_calls:
                sure = sure.rstrip("\n")  # they may stand before a call
            self._show(self._between(sure))
            self._held = self._held[len(sure) :]
            return False
        at, mark = min(found)
        self._show(self._between(self._held[:at]))
        self._held = self._held[at + len(mark) :]
        if mark == self.form.open:
            self._walk, self._walked, self._end = JsonWalk(), 0, -1
        return True

    def _unbegun(self, walk: JsonWalk) -> bool:
        """A head, or JSON whose keys come in another order, or text that looks like a call."""
        held = self._held
        if (head := self.form.head.match(held)) and head["name"] in self.functions:
            self._begin(head["name"], "", head.groupdict().get("id"))
            self._arguments = self.form.arguments(self.functions[head["name"]])
        elif (head := hermes.OBJECT.match(held)) and head["name"] in self.functions:
            self._begin(head["name"], "")
            self._arguments = JsonArguments(depth=1)
        else:
            return self._read_whole(walk)
        assert head is not None
        self._held, self._walk = held[head.end() :], None
        return True

    def _read_whole(self, walk: JsonWalk) -> bool:
        walk.is_broken |= self._held.lstrip()[:1] not in ("", "{", "[")
        if not walk.is_broken and self._end < 0:
            self._end = walk.end(self._held, self._walked, depth=0)
            self._walked = len(self._held)
            if self._end < 0 and not walk.is_broken:
                return False
        if (body := self._body(max(self._end, 0), is_json=self._end >= 0)) is None:
            return False
        try:
            read = json.loads(body)
            calls = [
                (one["name"], one.get("arguments", {}), one.get("id"))
                for one in (read if isinstance(read, list) else [read])
            ]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            calls = []
        if calls and all(name in self.functions and isinstance(a, dict) for name, a, _ in calls):
            for name, arguments, call_id in calls[: self.limit or None]:
                self._begin(name, json.dumps(arguments, ensure_ascii=False), call_id)
        else:
            self._show(f"{self.form.open}{body}{self.form.close}")
        self._leave()
        return True

    def _inside(self, arguments: Arguments) -> bool:
        if not self._is_read(arguments):
            taken, said = arguments.read(self._held)
            self._say(said)
            self._held = self._held[taken:]
            return self._is_read(arguments)
        if self._body(0, is_json=arguments.is_done) is None:
            return False
        if arguments.is_broken:
            self._say(arguments.closing())
        self._leave()
        return True

    @staticmethod
    def _is_read(arguments: Arguments) -> bool:
        return arguments.is_done or arguments.is_broken

    def _body(self, begin: int, *, is_json: bool) -> str | None:
        """What is held up to the call's end, which is taken off; None: it has not come.

        `is_json`: its arguments end at `begin`."""
        close = self.form.close
        at = self._held.find(close or self.form.open, begin)
        if not close and is_json:
            at = begin
        if at < 0:
            return None
        body, self._held = self._held[:at], self._held[at + len(close) :]
        return body

    def _leave(self) -> None:
        self._walk = self._arguments = None
        self._after_call = True
        self.done = 0 < self.limit <= self.num_calls

    def _begin(self, name: str, arguments: str, call_id: str | None = None) -> None:
        given = call_id if isinstance(call_id, str) and call_id else self.form.new_id()
        self._pieces.append(CallPiece(self.num_calls, arguments, given, name, self._num_shown))
        self.num_calls += 1

    def _say(self, arguments: str) -> None:
        if arguments:
            piece = CallPiece(self.num_calls - 1, arguments, num_ahead=self._num_shown)
            self._pieces.append(piece)
