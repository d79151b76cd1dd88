"""The work of a child that may die of a stranger's grammar, and the words between it and its
gateway.

A request is the JSON text of a `Job`: JSON keeps numbers of any length and broken Unicode as they
came.  The last of the child's frames counts: a verdict, or the message for its death.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import fields

import msgspec

from epd.api.asked.structured import Constraint
from epd.api.asked.tools import ToolUse
from epd.api.expendable.fork_server import Say, Work
from epd.api.http.errors import ApiError


class Job(msgspec.Struct, frozen=True):
    """One of the two."""

    constraint: Constraint | None = None
    tool_use: ToolUse | None = None


class Trying(msgspec.Struct, frozen=True, tag=True):
    """This field is being compiled."""

    param: str


class GrammarAccepted(msgspec.Struct, frozen=True, tag="Accepted"):
    grammar: str


class GrammarRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Why no answer can follow it: an ApiError 400."""

    message: str
    param: str | None
    code: str | None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Our own fault."""

    trace: str


Word = GrammarAccepted | Broken | GrammarRefused | Trying


def job_text(source: Constraint | ToolUse) -> bytes:
    """Raises RecursionError."""
    name = "constraint" if isinstance(source, Constraint) else "tool_use"
    return json.dumps({name: source}, default=_members).encode()


def _members(value: Constraint | ToolUse) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def refusal(error: ApiError) -> GrammarRefused:
    return GrammarRefused(error.message, error.param, error.code)


def prepare(model_dir: str, vocab_size: str, additional: str) -> Work:
    from epd.api.asked.grammar import checked_grammar
    from epd.model_files.grammar import Grammars

    grammars, closes = Grammars(model_dir, int(vocab_size)), additional == "closed"
    grammars.warm_up()

    def verdict(request: bytes, say: Say) -> Word:
        def watch(word: str | ApiError) -> None:
            told = Trying(word) if isinstance(word, str) else refusal(word)
            say(msgspec.msgpack.encode(told))

        try:
            job = msgspec.convert(json.loads(request), Job)
            source = job.constraint or job.tool_use
            assert source is not None
            grammar = checked_grammar(source, grammars.fault, watch, closes)
            param = source.param if isinstance(source, Constraint) else "tools"
            watch(param)
            if reason := grammars.proof(grammar):
                return GrammarRefused(
                    f"{param} cannot be followed: {reason}", param, "invalid_schema"
                )
            return GrammarAccepted(grammar)
        except ApiError as error:
            return refusal(error)
        except MemoryError:
            raise
        except Exception:
            return Broken(traceback.format_exc())

    return lambda request, say: say(msgspec.msgpack.encode(verdict(request, say)))
