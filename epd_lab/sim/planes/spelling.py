"""How a trace names a message: by type and identity, stable over runs, `Grant 3/1/0#1`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from epd.messages import Message

Spelling = Callable[[Any], str]
_SPELLINGS: dict[type[Message], Spelling] = {}


def describe(message: Message) -> str:
    """Type and identity of a message."""
    kind = type(message)
    spell = _SPELLINGS.get(kind)
    if spell is None:
        spell = _SPELLINGS[kind] = _spelling(kind)
    return spell(message)


def _spelling(kind: type[Message]) -> Spelling:
    """How messages of a kind are distinguished: by room, by request, by their fields, or not."""
    name, fields = kind.__name__, kind.__struct_fields__
    if "room" in fields or "request_id" in fields:
        ident = attrgetter("room" if "room" in fields else "request_id")
        if "attempt" in fields:
            return lambda message: f"{name} {ident(message)}#{message.attempt}"
        return lambda message: f"{name} {ident(message)}#"
    if "chunks" in fields:
        return lambda message: (
            "Tokens " + ",".join([f"{chunk.request_id}@{chunk.start}" for chunk in message.chunks])
        )
    return lambda message: name
