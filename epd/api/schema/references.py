"""References of a JSON schema that is put into another one.

A local reference (`#/$defs/A`, `#/properties/a`, `#`) is a path from the root of its document. In
another document its schema stands deeper, so the way there is put in front of each path.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from epd.frontend import JsonObject

_DATA = ("const", "default", "enum", "examples")  # values, in which nothing is a schema
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_ABOUT = ("$id", "$schema", "x-guidance")  # of a document; an id would be where paths begin


def moved(schema: Mapping[str, object], to: str) -> JsonObject:
    """The same schema for the place `to`, such as `#/properties/arguments`."""
    return {key: _moved(key, value, to) for key, value in schema.items() if key not in _ABOUT}


def _moved(keyword: str, value: object, to: str) -> object:
    if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
        return to + value[1:]
    if keyword in _DATA:
        return value
    if isinstance(value, list):
        return [_moved("", item, to) for item in value]
    if isinstance(value, dict):
        if keyword in NAMED:
            return {name: _moved("", one, to) for name, one in value.items()}
        return {key: _moved(key, one, to) for key, one in value.items()}
    return value


def target(root: object, reference: str) -> object | None:
    """What a local reference refers to; None: nothing."""
    found = root if reference.startswith("#") else None
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found
