"""Schemas that say what an answer is not: complements, conditions, counts and names, of few values.

Values come from a small set, so that what is admitted can be compared with what is valid.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "c")
TEXTS = ("", "a", "ab", "abc", "b.zip", "zip", "b", "a\r", "A1", "x y")
NUMBERS = (-1, 0, 1, 1.5, 2, 7)
PATTERNS = (
    *("^(?!a|b$)[a-z.]*$", "^(?=.*b)a", "^(?!.*zip$).*$", "^ab?$", "^.$", r"\.(zip|x)$", "^(?!ab)"),
    *("^[^\\s]*$", "^a|b$", "b$", r"^[\w.]+$", "^(?!A1$)(?=.*\\d)", "^(a|b)c?", "^[ab]{1,2}$"),
)
MAX_DEPTH = 3


def contrary(seed: int) -> Any:
    draw = random.Random(seed)
    found = _schema(draw, 0)
    if draw.random() < 0.3:
        found = {**found, "$defs": {"d": _schema(draw, 1)}}
    return found


def value(draw: random.Random, depth: int = 0) -> Any:
    """What such a schema may be about."""
    kind = draw.randrange(4 if depth > 1 else 7)
    if kind < 4:
        return draw.choice((draw.choice(TEXTS), draw.choice(NUMBERS), None, draw.random() < 0.5))
    if kind == 4:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {name: value(draw, depth + 1) for name in NAMES if draw.random() < 0.5}


def _schema(draw: random.Random, depth: int) -> Any:
    leaves = (_kind, _values, _text, _number, _reference)
    inner = (_object, _object, _array, _object, _contrary, _contrary, _contrary, _kind, _values)
    return draw.choice(leaves if depth >= MAX_DEPTH else inner)(draw, depth)


def _kind(draw: random.Random, depth: int) -> Any:
    kinds = ("null", "boolean", "integer", "number", "string", "array", "object")
    return {"type": draw.sample(kinds, draw.randrange(1, 4))}


def _values(draw: random.Random, depth: int) -> Any:
    some = [*TEXTS, *NUMBERS, None, True, False]
    if draw.random() < 0.3:
        return {"const": draw.choice(some)}
    return {"enum": draw.sample(some, draw.randrange(1, 6))}


def _text(draw: random.Random, depth: int) -> Any:
    found: dict[str, Any] = {"type": "string"} if draw.random() < 0.7 else {}
    for key, share in (("minLength", 0.2), ("maxLength", 0.2)):
        if draw.random() < share:
            found[key] = draw.randrange(4)
    if draw.random() < 0.7:
        found["pattern"] = draw.choice(PATTERNS)
    return found


def _number(draw: random.Random, depth: int) -> Any:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = {key: draw.choice(NUMBERS) for key in draw.sample(keys, draw.randrange(3))}
    return {"type": draw.choice(("integer", "number"))} | bounds


def _reference(draw: random.Random, depth: int) -> Any:
    return {"$ref": draw.choice(("#/$defs/d", "#/properties/a"))}


def _array(draw: random.Random, depth: int) -> Any:
    found: dict[str, Any] = {"type": "array", "items": _schema(draw, depth + 1)}
    if draw.random() < 0.5:
        found["items"] = {"enum": draw.sample(TEXTS, draw.randrange(1, 6))}
        found["uniqueItems"] = draw.random() < 0.8
    for key in ("minItems", "maxItems"):
        if draw.random() < 0.3:
            found[key] = draw.randrange(4)
    return found


def _object(draw: random.Random, depth: int) -> Any:
    names = draw.sample(NAMES, draw.randrange(4))
    found: dict[str, Any] = {"type": "object"} if draw.random() < 0.8 else {}
    found["properties"] = {name: _schema(draw, depth + 1) for name in sorted(names)}
    if draw.random() < 0.4:
        found["required"] = draw.sample(NAMES, draw.randrange(3))
    if draw.random() < 0.5:
        found["additionalProperties"] = draw.choice((False, False, _schema(draw, MAX_DEPTH)))
    for key in ("minProperties", "maxProperties"):
        if draw.random() < 0.3:
            found[key] = draw.randrange(4)
    if draw.random() < 0.2:
        some = {"enum": draw.sample(NAMES, 2)}
        found["propertyNames"] = draw.choice((some, {"not": some}, {"maxLength": 1}))
    if draw.random() < 0.1:
        found["patternProperties"] = {draw.choice(PATTERNS): _schema(draw, depth + 1)}
    if draw.random() < 0.2:
        found["dependentRequired"] = {draw.choice(NAMES): draw.sample(NAMES, 1)}
    if draw.random() < 0.1:
        found["dependentSchemas"] = {draw.choice(NAMES): _schema(draw, depth + 1)}
    return found


def _contrary(draw: random.Random, depth: int) -> Any:
    def one() -> Any:
        return draw.choice((_schema(draw, depth + 1), {"required": draw.sample(NAMES, 1)}))

    kind = draw.randrange(4)
    if kind == 0:
        return {**_schema(draw, depth + 1), "not": one()}
    if kind == 1:
        return {"oneOf": [one() for _ in range(draw.randrange(2, 4))]}
    if kind == 2:
        condition = {"if": one(), "then": one(), "else": one()}
        return {key: part for key, part in condition.items() if key == "if" or draw.random() < 0.8}
    return {draw.choice(("anyOf", "allOf")): [one() for _ in range(2)]}
