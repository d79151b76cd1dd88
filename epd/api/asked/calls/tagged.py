"""Arguments between tags, each with its name and a text that stands for a value."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from re import Pattern

_NAMES = (
    *(("string", str), ("object", dict), ("array", list), ("null", type(None))),
    *(("number", int), ("number", float), ("integer", int), ("integer", float)),
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as templates of Python write them


@dataclass(frozen=True, slots=True)
class Tags:
    key: Pattern[str]  # group 1 is the name of an argument whose value follows
    value_end: str
    next: str  # begins the next argument
    end: str  # begins the end of the call
    is_broken_line: bool = False  # a line break stands around a value that is not part of it


class TaggedArguments:
    """An argument comes out when it is whole.  Its value ends at the tag behind which the next one,
    or the call's end, begins: other tags in it are part of it."""

    def __init__(self, tags: Tags, schema: object) -> None:
        self.is_done = self.is_broken = False
        self._tags = tags
        members = schema.get("properties") if isinstance(schema, dict) else None
        self._schemas = members if isinstance(members, dict) else {}
        self._name: str | None = None  # of the argument whose value comes
        self._walked = 0  # of that value
        self._told = "{"

    def read(self, held: str) -> tuple[int, str]:
        at, told = 0, []
        while not self.is_done and not self.is_broken:
            if self._name is None:
                begun = held[at:].lstrip()
                if begun.startswith(self._tags.end):
                    self.is_done = True
                    told.append(self.closing())
                elif key := self._tags.key.match(held, at):
                    self._name, self._walked, at = key[1], 0, key.end()
                else:
                    self.is_broken = self._tags.end in begun
                    break
            elif (value := self._value(held, at)) is None:
                break
            else:
                at += len(value) + len(self._tags.value_end)
                told.append(self._argument(self._name, value))
                self._name = None
        return at, "".join(told)

    def closing(self) -> str:
        return "{}" if self._told == "{" else "}"

    def _value(self, held: str, begin: int) -> str | None:
        """None: its end has not come."""
        end = self._tags.value_end
        while (at := held.find(end, begin + self._walked)) >= 0:
            behind = held[at + len(end) :].lstrip()
            marks = (self._tags.next, self._tags.end)
            if behind.startswith(marks):
                return held[begin:at]
            self._walked = at - begin
            if any(mark.startswith(behind) for mark in marks):
                return None
            self._walked += 1
        self._walked = max(self._walked, len(held) - begin - len(end) + 1)
        return None

    def _argument(self, name: str, text: str) -> str:
        if self._tags.is_broken_line:
            text = text.removeprefix("\n").removesuffix("\n")
        value = json.dumps(typed(self._schemas.get(name), text), ensure_ascii=False)
        told = f"{self._told}{json.dumps(name, ensure_ascii=False)}: {value}"
        self._told = ", "
        return told


def typed(schema: object, text: str) -> object:
    """A text where its schema takes text and nothing else that this is, or where it is no JSON."""
    try:
        kinds = _kinds(schema)
        if kinds == {"string"}:
            return text
        said = _LITERALS.get(text.strip(), text)
        value = json.loads(said, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return text if "string" in kinds and not kinds & _kinds_of(value) else value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _kinds(schema: object) -> set[str]:
    """Types of JSON Schema that it takes; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    said, several = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    found = {one for one in (said if isinstance(said, list) else [said]) if isinstance(one, str)}
    if not found and isinstance(choices := schema.get("enum"), list):
        found = set().union(*map(_kinds_of, choices))
    return found.union(*map(_kinds, several)) if isinstance(several, list) else found


def _kinds_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, float) and not value.is_integer():
        return {"number"}
    return {name for name, kind in _NAMES if isinstance(value, kind)}
