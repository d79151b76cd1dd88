"""Tool calls: what a client offers, what a model must or may call, and calls found in its text.

The model's own chat template shows the tools to the model, and decides what a call looks like: in
one of the forms of `calls.registry`.  A template that shows no tools, or writes calls in another
form, refuses them, rather than to let a call pass as text.

A call that is asked for (`required`, or one function by name) is enforced by a grammar: JSON, valid
against the function's parameters, between the marks of the family.  A call that is free (`auto`) is
parsed (`calls.parser`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Required, TypedDict

from epd.api.asked.structured import Constraint
from epd.frontend import JsonObject


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
    form: str = "hermes"  # of its calls: a name of `calls.registry.FORMS`

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
