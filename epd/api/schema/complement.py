"""Keywords that llguidance lacks, in terms of those that it has: exactly, or not at all.

`not`, `if`, `oneOf` and `dependencies` are branches of complements (De Morgan's laws), as far as
each keyword has one.  Patterns that begin by looking ahead are several patterns, and an array of
different items of few values is one of its permutations.  What is left here is refused later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, permutations
from typing import TypeGuard

from epd.api.schema.branches import exclude
from epd.api.schema.patterns import ahead, begun, literals, unbegun, unmatched, without
from epd.api.schema.references import NAMED, target
from epd.frontend import JsonObject

MANY = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_TOGETHER = frozenset(  # read beside each other
    "$ref additionalItems additionalProperties contains else if items maxContains minContains "
    "patternProperties prefixItems properties then unevaluatedItems unevaluatedProperties".split()
)
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_BOUNDS = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
}  # fmt: skip
MAX_PARTS = 2000  # of all complements of a document: branches multiply
MAX_BRANCHES = 16  # of a `oneOf`, each beside the complements of the others
MAX_ARRAYS = 400
MAX_REFERENCES = 6  # one behind the other


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Positive:
    """`root`: the document, in which references are looked up."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_parts = 0
        self._seen: list[str] = []  # references whose complement is looked for

    def __call__(self, schema: object) -> object:
        """The same schema, in positive terms where that can be."""
        if not isinstance(schema, dict):
            return schema
        found = {key: self._below(key, value) for key, value in schema.items()}
        self._exclude(found, schema)
        self._imply(found, schema)
        if "not" in found and (other := self.complement(schema["not"])) is not None:
            if other is False:
                return False
            del found["not"]
            conjoin(found, self(other))
        _look_ahead(found)
        _name_ahead(found)
        _permute(found)
        return found

    def _below(self, key: str, value: object) -> object:
        if isinstance(value, dict):
            if key in (*NAMED, "dependencies"):
                return {name: self(one) for name, one in value.items()}
            is_schema = key in ONE and key != "propertyNames"  # names have words of their own
            return self(value) if is_schema else value
        return list(map(self, value)) if isinstance(value, list) and key in MANY else value

    def _exclude(self, found: JsonObject, schema: JsonObject) -> None:
        """`oneOf`: `anyOf`, each branch beside what no other one is."""
        branches, given = found.get("oneOf"), schema.get("oneOf")
        if not isinstance(branches, list) or not isinstance(given, list):
            return
        if not exclude(list(map(self._target, given))):
            if len(given) > MAX_BRANCHES:
                return
            rests = [given[:i] + given[i + 1 :] for i in range(len(given))]
            others = [list(map(self.complement, rest)) for rest in rests]
            if None in chain(*others):
                return
            several = zip(branches, others, strict=True)
            branches = [joined(branch, *map(self, rest)) for branch, rest in several]
        del found["oneOf"]
        conjoin(found, {"anyOf": branches})

    def _imply(self, found: JsonObject, schema: JsonObject) -> None:
        if "if" in schema and (other := self.complement(schema["if"])) is not None:
            condition, then = found.pop("if"), found.pop("then", True)
            otherwise = joined(self(other), found.pop("else", True))
            conjoin(found, {"anyOf": [joined(condition, then), otherwise]})
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            named = found.get(key)
            if isinstance(named, dict):
                del found[key]
                for name, needed in named.items():
                    needs = {"required": needed} if isinstance(needed, list) else needed
                    conjoin(found, {"anyOf": [_lacking(name), needs]})

    def _target(self, schema: object) -> object:
        """What a reference alone refers to."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = target(self._root, schema["$ref"])
        return schema

    # --- complements ------------------------------------------------------------------------------

    def complement(self, schema: object) -> object | None:
        """The schema of all other values; None: there is none."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            return None
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        found = list[object]()
        for key, value in schema.items():
            other = self._other(key, value, schema)
            if other is None:
                return None
            if other is not False:
                found.append(other)
        return _any_of(found)

    def _other(self, key: str, value: object, schema: JsonObject) -> object | None:
        """Of one keyword."""
        if key in _BOUNDS:
            return _beyond(*_BOUNDS[key], value)
        if key in ("anyOf", "oneOf") and isinstance(value, list):
            if key == "oneOf" and not exclude(list(map(self._target, value))):
                return None
            others = [self.complement(one) for one in value]
            return None if None in others else joined(*others)
        if key == "allOf" and isinstance(value, list):
            others = [self.complement(one) for one in value]
            return None if None in others else _any_of(others)
        if key == "$ref" and isinstance(value, str) and value not in self._seen:
            self._seen.append(value)
            other = self.complement(target(self._root, value))
            self._seen.pop()
            return other
        if key == "properties" and isinstance(value, dict):
            named = {name: self.complement(one) for name, one in value.items()}
            if None in named.values():
                return None
            return _any_of([_having(*one) for one in named.items() if one[1] is not False])
        return _other_of_values(key, value)


def _other_of_values(key: str, value: object) -> object | None:
    if key == "not":
        return value
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        is_known = all(kind in _KINDS for kind in kinds)  # whole numbers have no simple others
        return _of_no(*kinds) if is_known else None
    if key == "const":
        return _other_values([value])
    if key == "enum" and isinstance(value, list):
        return _other_values(value)
    if key == "required" and isinstance(value, list):
        lacking = _any_of([_lacking(name) for name in value if isinstance(name, str)])
        return joined({"type": "object"}, lacking)
    if key == "pattern" and isinstance(value, str):
        pattern = unmatched(value)
        return None if pattern is None else {"type": "string", "pattern": pattern}
    is_open = key == "additionalProperties" and value in (True, {})
    return False if is_open or key in ("$comment", "description", "title") else None


def _other_values(values: list[object]) -> object | None:
    found = list[object]()
    if texts := [value for value in values if isinstance(value, str)]:
        if (pattern := without(texts)) is None:
            return None
        found.append({"pattern": pattern})
    if truths := {value for value in values if isinstance(value, bool)}:
        other = [{"enum": [not one]} for one in truths] if len(truths) == 1 else []
        found.append(_any_of([_of_no("boolean"), *other]))
    if None in values:
        found.append(_of_no("null"))
    if numbers := {value for value in values if is_number(value)}:
        found.append(_any_of([_of_no("number"), *_between(sorted(numbers))]))
    is_plain = not any(isinstance(value, dict | list) for value in values)
    return joined(*found) if is_plain and all(map(math.isfinite, numbers)) else None


def _between(numbers: list[float]) -> Iterator[JsonObject]:
    above: list[JsonObject] = [{"exclusiveMinimum": number} for number in numbers]
    below: list[JsonObject] = [{"exclusiveMaximum": number} for number in numbers]
    for bounds in zip([{}, *above], [*below, {}], strict=True):
        yield {"type": "number", **bounds[0], **bounds[1]}


def _beyond(kind: str, bound: str, step: int, value: object) -> object | None:
    if not is_number(value):
        return None
    return {"type": kind, bound: value + step} if value + step >= 0 or not step else False


def _of_no(*kinds: object) -> object:
    others = [one for one in _KINDS if one not in kinds]
    return {"type": others} if others else False


def _lacking(name: str) -> JsonObject:
    """Any object without that member."""
    return {"properties": {name: False}, "additionalProperties": True}


def _having(name: str, schema: object) -> JsonObject:
    member = {"properties": {name: schema}, "additionalProperties": True}
    return {"type": "object", "required": [name], **member}


# --- several at once ------------------------------------------------------------------------------


def _any_of(schemas: list[object]) -> object:
    some = [one for one in schemas if one is not False]
    if len(some) > 1:
        return {"anyOf": some}
    return some[0] if some else False


def joined(*schemas: object) -> object:
    """All of them."""
    if False in schemas:
        return False
    found: JsonObject = {}
    for one in schemas:
        if isinstance(one, dict):
            conjoin(found, one)
    return found


def conjoin(found: JsonObject, other: object) -> None:
    """`found` and the other: beside its keywords, where none changes what another one means."""
    if not isinstance(other, dict):
        found["allOf"] = [*_several(found), other]
        return
    is_apart = _TOGETHER.isdisjoint(found) or _TOGETHER.isdisjoint(other)
    if is_apart and all(repr(found.get(key, one)) == repr(one) for key, one in other.items()):
        found |= other
    elif other:
        found["allOf"] = [*_several(found), other]


def _several(schema: JsonObject) -> list[object]:
    all_of = schema.get("allOf", [])
    return all_of if isinstance(all_of, list) else [all_of]


# --- what is no complement ------------------------------------------------------------------------


def _look_ahead(found: JsonObject) -> None:
    """A pattern that begins by looking ahead is several patterns."""
    pattern = found.get("pattern")
    parts = ahead(pattern) if isinstance(pattern, str) else None
    if parts is not None:
        must, must_not, found["pattern"] = parts
        others = list(map(unbegun, must_not))
        if None in others:
            found["pattern"] = pattern
            return
        for one in (*map(begun, must), *others):
            conjoin(found, {"pattern": one})


def _name_ahead(found: JsonObject) -> None:
    """Names that a pattern must not be, as members that are not there."""
    patterns, properties = found.get("patternProperties"), found.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    for pattern in [*patterns]:
        must, must_not, rest = ahead(pattern) or ([], [], "")
        whole = [one.endswith("$") and literals(one[:-1]) for one in must_not]
        names = [name for one in whole for name in one or ()]
        is_said = rest and not must and all(whole) and found.get("additionalProperties") is False
        if is_said and properties.keys().isdisjoint(names):
            found["properties"] = properties = properties | dict.fromkeys(names, False)
            found["patternProperties"] = patterns = {
                rest if one == pattern else one: value for one, value in patterns.items()
            }


def _permute(found: JsonObject) -> None:
    """`uniqueItems` of few values: an array is one of their permutations."""
    unique, items, kinds = found.get("uniqueItems"), found.get("items"), found.get("type")
    fewest, most = found.get("minItems", 0), found.get("maxItems", math.inf)
    is_other = isinstance(kinds, str) and kinds != "array"
    if unique is False or is_other or (is_number(most) and most <= 1):
        found.pop("uniqueItems", None)
    elif unique is True and kinds == "array" and "enum" not in found and isinstance(items, dict):
        values = [items["const"]] if "const" in items else items.get("enum")
        if not isinstance(values, list) or not all(isinstance(v, str | None) for v in values):
            return
        if not is_number(fewest) or not is_number(most):
            return
        values = list(dict.fromkeys(values))
        sizes = [n for n in range(len(values) + 1) if fewest <= n <= most]
        if sum(math.perm(len(values), n) for n in sizes) <= MAX_ARRAYS:
            del found["uniqueItems"]
            found["enum"] = [[*one] for n in sizes for one in permutations(values, n)]
