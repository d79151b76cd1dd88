"""Bodies that are read by their type: a struct says what may be sent, and is what is documented.

The one reader turns what is wrong with a value into a complaint that names its place, as
`epd.api.fields` does for single fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from epd.api.errors import ApiError, bad_request

T = TypeVar("T")
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


def read_shape(value: Mapping[str, Any], shape: type[T]) -> T:
    """The value as that shape.  Raises ApiError 400."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None


def _complaint(text: str) -> ApiError:
    found = _AT.fullmatch(text)
    assert found is not None  # the second half is optional
    what, path = found["what"], found["path"] or ""
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
        message = f"{path} must be {_in_words(bounded[1])} {bounded[2].replace('`', '')}"
        return bad_request(message, path, "out_of_range")
    if invalid := re.fullmatch(r"Invalid (?:enum )?value (.*)", what):
        message = f"{path} {invalid[1][:80]} is not supported ({SEE})"
        return bad_request(message, path, "unsupported_parameter")
    return bad_request(f"{path}: {what} ({SEE})", path)


def _in_words(kinds: str) -> str:
    words = [_WORDS.get(kind, kind) for kind in kinds.split(" | ")]
    return " or ".join(word for word in words if word != "null" or len(words) == 1)
