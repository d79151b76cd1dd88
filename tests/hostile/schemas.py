"""JSON schemas that strangers might send: numbers, depths, references, lengths, patterns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.hostile.grammars import regex

Schema = Any  # an object or a boolean
MAX_DEPTH = 4
NAMES = ("a", "b", "c", "é", "", "a b", '"', "\\", "__proto__", "$ref", "\ud83d", "x" * 200)
INTEGERS = (
    0, 1, -1, 7, 10, 255, 10**6, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31),
    -(2**53), -(2**63), -(2**63) + 1, -(2**63) - 1, 10**19, -(10**19), 10**40,
)  # fmt: skip
FLOATS = (0.5, -0.0, 1e-9, 1e-300, 5e-324, 0.1, 1.5e15, 1.7976931348623157e308, -1e308, 1e16)
COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10**5, 10**9, 2**31, 2**63, 2**64, -1)
FORMATS = ("date-time", "date", "time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname", "x")


def schema(seed: int) -> Schema:
    draw = random.Random(seed)
    return draw.choice((_any, _any, _any, _chain, _deep, _wide, _bounds, _cycle))(draw, 0)


def _number(draw: random.Random) -> float:
    number = draw.choice(draw.choice((INTEGERS, FLOATS)))
    return number + draw.choice((0, 0, 1, -1)) if isinstance(number, int) else number


def _bounds(draw: random.Random, depth: int) -> Schema:
    found: dict[str, Any] = {"type": draw.choice(("integer", "integer", "number"))}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw.random() < 0.5:
            found[key] = _number(draw)
    if draw.random() < 0.2:
        found["multipleOf"] = _number(draw)
    return found


def _text(draw: random.Random, depth: int) -> Schema:
    found: dict[str, Any] = {"type": "string"}
    for key in ("minLength", "maxLength"):
        if draw.random() < 0.3:
            found[key] = draw.choice(COUNTS)
    if draw.random() < 0.4:
        found["pattern"] = regex(draw.getrandbits(32))
    if draw.random() < 0.2:
        found["format"] = draw.choice(FORMATS)
    return found


def _array(draw: random.Random, depth: int) -> Schema:
    found: dict[str, Any] = {"type": "array", "items": _any(draw, depth + 1)}
    for key in ("minItems", "maxItems"):
        if draw.random() < 0.4:
            found[key] = draw.choice(COUNTS)
    if draw.random() < 0.2:
        found["prefixItems"] = [_any(draw, depth + 1) for _ in range(draw.randrange(4))]
    return found


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randrange(5))
    found: dict[str, Any] = {"type": "object"}
    found["properties"] = {name: _any(draw, depth + 1) for name in names}
    if draw.random() < 0.5:
        found["required"] = draw.sample(NAMES, draw.randrange(4))
    if draw.random() < 0.4:
        found["additionalProperties"] = draw.choice((True, False, _any(draw, depth + 1)))
    if draw.random() < 0.1:
        names: tuple[Schema, ...] = (True, {"enum": [*names]}, {"pattern": "^[a-c]"})
        found["propertyNames"] = draw.choice(names)
    if draw.random() < 0.1:
        found["patternProperties"] = {regex(draw.getrandbits(32)): _any(draw, depth + 1)}
    for key in ("minProperties", "maxProperties"):
        if draw.random() < 0.1:
            found[key] = draw.choice(COUNTS)
    return found


def _several(draw: random.Random, depth: int) -> Schema:
    several = [_any(draw, depth + 1) for _ in range(draw.randrange(1, 5))]
    return {draw.choice(("anyOf", "oneOf", "allOf")): several}


def _values(draw: random.Random, depth: int) -> Schema:
    values = [*NAMES, *INTEGERS, *FLOATS, None, True, [], {}, {"a": [None]}]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randrange(len(values)))}


def _reference(draw: random.Random, depth: int) -> Schema:
    return {"$ref": draw.choice(("#", "#/properties/a", "#/$defs/d0", "#/nowhere", "x:y"))}


def _odd(draw: random.Random, depth: int) -> Schema:
    return draw.choice(
        (True, False, {}, {"not": {}}, {"not": {"not": {}}}, {"type": "objec"}, {"type": []},
         {"type": ["null", "integer"]}, {"if": {}, "then": False}, {"contains": {}},
         {"uniqueItems": True}, {"enum": []})
    )  # fmt: skip


_KINDS: tuple[Callable[[random.Random, int], Schema], ...] = (
    *(_array, _object, _object, _several),
    *(_bounds, _text, _values, _reference, _odd),
)


def _any(draw: random.Random, depth: int) -> Schema:
    return draw.choice(_KINDS if depth < MAX_DEPTH else _KINDS[4:])(draw, depth)


def _link(draw: random.Random, name: str) -> Schema:
    target = {"$ref": f"#/$defs/{name}"}
    links: tuple[Schema, ...] = (
        *(target, {"type": "array", "items": target}, {"anyOf": [target, {"type": "null"}]}),
        *({"allOf": [target]}, {"type": "object", "properties": {"a": target}, "required": ["a"]}),
    )
    return draw.choice(links)


def _chain(draw: random.Random, depth: int) -> Schema:
    """Of references, up to where the text has its bound."""
    length = int(10 ** draw.uniform(0, 3))
    defs: dict[str, Any] = {f"d{i}": _link(draw, f"d{i + 1}") for i in range(length)}
    defs[f"d{length}"] = _any(draw, MAX_DEPTH)
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _cycle(draw: random.Random, depth: int) -> Schema:
    length = draw.randrange(1, 30)
    defs = {f"d{i}": _link(draw, f"d{draw.randrange(length)}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _deep(draw: random.Random, depth: int) -> Schema:
    found = _any(draw, MAX_DEPTH)
    for _ in range(int(10 ** draw.uniform(0, 2.6))):
        found = draw.choice(
            ({"type": "array", "items": found}, {"type": "object", "properties": {"a": found}},
             {"anyOf": [found, {"type": "null"}]}, {"allOf": [found]})
        )  # fmt: skip
    return found


def _wide(draw: random.Random, depth: int) -> Schema:
    count = int(10 ** draw.uniform(1, 3.2))
    leaf = _any(draw, MAX_DEPTH)
    many: tuple[Schema, ...] = (
        {"enum": [f"{draw.getrandbits(24):x}" for _ in range(count)]},
        {"anyOf": [{"const": i} for i in range(count)]},
        {"type": "object", "properties": {f"p{i}": leaf for i in range(count)}},
        {"allOf": [_bounds(draw, depth) for _ in range(min(count, 60))]},
        {"type": "array", "prefixItems": [leaf] * count},
    )
    return draw.choice(many)
