"""What is read by its type: a struct says what may be sent, and is what is documented.

The one reader turns what is wrong with a value into a complaint that names its place, as
`epd.api.http.fields` does for what no type says alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from epd.api.http.errors import ApiError, bad_request
from epd.api.http.fields import shown

T = TypeVar("T")
JsonValue = Any  # of a shape: what msgspec calls any JSON value; `object` it takes for a class
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)  # names have any text
_WORDS = {
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
SEE = "GET /openapi.json tells what is taken"


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object: every field that is not declared is refused by name."""


def read_shape(value: Mapping[str, object], shape: type[T]) -> T:
    """The value as that shape.  Raises ApiError 400."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        whole = with_integers(value, inspect.type_info(shape))
        if whole is value:
            raise _complaint(str(error), value, shape) from None
        return read_shape(whole, shape)


def with_integers(value: JsonValue, kind: inspect.Type) -> JsonValue:
    """The same value, if no integer in it is written as 5.0: JSON's 5.0 is one where one is due."""
    if isinstance(value, float):
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        takes = {type(one) for one in kinds}
        is_due = inspect.IntType in takes and inspect.FloatType not in takes
        return int(value) if is_due and value.is_integer() else value
    if isinstance(kind, inspect.UnionType):
        changed = (with_integers(value, one) for one in kind.types)
        return next((one for one in changed if one is not value), value)
    if isinstance(value, dict) and isinstance(kind, inspect.StructType):
        named = {field.encode_name: field.type for field in kind.fields}
        pairs = {k: with_integers(v, named[k]) if k in named else v for k, v in value.items()}
        return pairs if any(pairs[k] is not v for k, v in value.items()) else value
    if isinstance(value, list) and isinstance(kind, inspect.ListType | inspect.VarTupleType):
        items = [with_integers(item, kind.item_type) for item in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value


def _complaint(text: str, value: Mapping[str, object], shape: type[object]) -> ApiError:
    found = _AT.fullmatch(text)
    assert found is not None  # the second half is optional
    what, path = found["what"], found["path"] or ""
    given = value.get(path)
    is_of_type = not re.fullmatch(r"Expected `[^`]*`, got .*", what)
    if is_of_type and isinstance(given, int | float | str) and (allowed := _allowed(shape, path)):
        told = f"'{given[:40]}'" if isinstance(given, str) else shown(given)
        return bad_request(f"{path} must be {allowed}, not {told}", path, "out_of_range")
    if field := re.search(r"unknown field `(.*)`", what, re.DOTALL):
        name = f"{path}.{field[1]}" if path else field[1]
        code = "unsupported_parameter" if path else "unknown_parameter"
        return bad_request(f"{name[:120]} is not supported; remove it ({SEE})", name[:120], code)
    if field := re.search(r"missing required field `(.*)`", what):
        name = f"{path}.{field[1]}" if path else field[1]
        return bad_request(f"{name} is missing", name)
    if expected := re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", what):
        wanted, got = (_in_words(kinds) for kinds in expected.groups())
        return bad_request(f"{path} must be {wanted}, not {got}", path, "invalid_type")
    if bounded := re.fullmatch(r"Expected `([^`]*)` (.*)", what):
        bound = bounded[2].replace("<=", "at most").replace(">=", "at least")
        message = f"{path} must be {_in_words(bounded[1])} {bound}"
        return bad_request(message, path, "out_of_range")
    if invalid := re.fullmatch(r"Invalid (?:enum )?value (.*)", what):
        message = f"{path} {invalid[1][:80]} is not supported ({SEE})"
        return bad_request(message, path, "unsupported_parameter")
    return bad_request(f"{path}: {what} ({SEE})", path)


def _allowed(shape: type[object], name: str) -> str:
    """The values that a field may have, in words; empty if bounds do not tell."""
    _, found = msgspec.json.schema_components([shape])
    schema = found[shape.__name__]["properties"].get(name, {})
    low, high = schema.get("minimum"), schema.get("maximum")
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "exclusiveMinimum" in schema:
        return f"above {schema['exclusiveMinimum']} and at most {high}"
    if low is not None:
        return f"at least {low}" if high is None else f"{low} to {high}"
    return ""


def _in_words(kinds: str) -> str:
    words = [_WORDS.get(kind, kind) for kind in kinds.split(" | ")]
    return " or ".join(word for word in words if word != "null" or len(words) == 1)
