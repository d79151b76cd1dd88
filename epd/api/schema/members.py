"""Which members an object may have: whether all are listed, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from epd.api.schema.branches import required
from epd.frontend import JsonObject

JOINED = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref")
_LISTS = ("additionalProperties", "patternProperties", "properties")
_ABOUT_OTHERS = ("additionalProperties", "unevaluatedProperties")
MAX_BRANCHES = 64
UNBOUNDED = 1 << 62  # members


def may_close(schema: JsonObject) -> bool:
    """Whether it lists its members, and can be without others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(key in schema for key in _ABOUT_OTHERS):
        return False
    fewest = schema.get("minProperties", 0)
    has_all = all(name in properties for name in required(schema))
    return has_all and isinstance(fewest, int) and fewest <= len(properties)


def speaks_with_others(schema: JsonObject) -> bool:
    """Whether it and a part of it, or several parts, list members of one object."""
    parts = [one for key in JOINED if key in schema for one in _parts(key, schema[key])]
    if not any(isinstance(one, str) or _lists_members(one) for one in parts):
        return False
    lists = "properties" in schema or "patternProperties" in schema
    all_of = schema.get("allOf")
    has_several = isinstance(all_of, list) and len(all_of) > 1
    return lists or has_several or sum(key in schema for key in JOINED) > 1


def _lists_members(schema: object) -> bool:
    """Not so if it only forbids some, whatever the others are."""
    if not isinstance(schema, dict):
        return False
    if schema.get("additionalProperties") is True and "patternProperties" not in schema:
        properties = schema.get("properties", {})
        lists = not isinstance(properties, dict) or any(
            one is not False for one in properties.values()
        )
    else:
        lists = any(key in schema for key in _LISTS)
    return lists or any(
        isinstance(one, str) or _lists_members(one)
        for key in JOINED
        if key in schema
        for one in _parts(key, schema[key])
    )


def _parts(key: str, value: object) -> Iterator[object]:
    """Schemas, and texts of references."""
    if isinstance(value, dict) and key == "dependentSchemas":
        value = list(value.values())
    yield from value if isinstance(value, list) else (value,)


def count_members(schema: JsonObject) -> None:
    """Bound the number of members by their names, where all are listed; else only drop bounds
    without effect.  Rewrites `schema`."""
    needed = {*required(schema)}
    fewest, most = schema.get("minProperties", 0), schema.get("maxProperties", UNBOUNDED)
    if not isinstance(fewest, int) or not isinstance(most, int) or min(fewest, most) < 0:
        return
    if fewest <= len(needed):
        schema.pop("minProperties", None)
    properties = schema.get("properties", {})
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if not is_closed or not isinstance(properties, dict):
        return
    names = [name for name, one in properties.items() if one is not False]
    if most >= len(names):
        schema.pop("maxProperties", None)
        most = len(names)
    has_bound = "maxProperties" in schema or fewest > 1  # llguidance knows how to have one
    if not has_bound or "anyOf" in schema or not needed <= {*names} or fewest > most:
        return
    if math.comb(len(names), most) * math.comb(most, fewest) > MAX_BRANCHES:
        return
    for key in ("minProperties", "maxProperties"):
        schema.pop(key, None)
    schema["anyOf"] = [
        {
            "required": [*some],
            "properties": dict.fromkeys([name for name in names if name not in among], False),
            "additionalProperties": True,
        }
        for among in combinations(names, most)
        if needed <= {*among}
        for some in combinations(among, fewest)
    ]
