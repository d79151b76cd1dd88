"""Whether the branches of a `oneOf` exclude each other, so that it is an `anyOf`."""

from __future__ import annotations

from itertools import combinations

from epd.frontend import JsonObject

MAX_PAIRS = 64  # branches that are compared each with each


def exclude(branches: object) -> bool:
    """Whether nothing can be two of these.  Many are compared by values only."""
    if not isinstance(branches, list) or not all(isinstance(one, dict) for one in branches):
        return False
    if len(branches) > MAX_PAIRS:
        return _have_own_values(branches) or any(
            _have_own_values([properties(one).get(name, {}) for one in branches])
            for name in required(branches[0])
            if all(_kinds(one) == {"object"} and name in required(one) for one in branches)
        )
    return all(_differ(one, other) for one, other in combinations(branches, 2))


def _have_own_values(schemas: list[object]) -> bool:
    values = [_values(one) if isinstance(one, dict) else None for one in schemas]
    texts = [text for one in values for text in {*map(repr, one or ())}]
    return None not in values and len(texts) == len({*texts})


def _differ(one: object, other: object) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values = _values(one), _values(other)
    if None not in values and not {*map(repr, values[0] or ())} & {*map(repr, values[1] or ())}:
        return True
    kinds = _kinds(one), _kinds(other)
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    if kinds != ({"object"}, {"object"}):
        return False
    return any(
        _differ(properties(one)[name], properties(other)[name])
        for name in {*required(one)} & {*required(other)}
        if name in properties(one) and name in properties(other)
    )


def _values(schema: JsonObject) -> list[object] | None:
    """All that it can be; none for numbers, since one value has several forms."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return values if all(isinstance(value, str | bool | None) for value in values) else None


def _kinds(schema: JsonObject) -> set[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, list):
        names = {str: "string", bool: "boolean", type(None): "null"}
        return {names[type(value)] for value in _values(schema) or ()}
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def properties(schema: JsonObject) -> JsonObject:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required(schema: JsonObject) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
