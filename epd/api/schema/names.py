"""`propertyNames`, which llguidance lacks, as members by name or by pattern: exactly."""

from __future__ import annotations

import math
import re

from epd.api.schema.branches import required
from epd.api.schema.patterns import ANY
from epd.frontend import JsonObject


def name_members(schema: JsonObject) -> None:
    """The same without `propertyNames`, where that can be; rewrites `schema`."""
    about = {} if schema.get("propertyNames") is True else schema.get("propertyNames")
    listed = schema.get("properties", {})
    if not isinstance(about, dict) or not isinstance(listed, dict):
        return
    rules = {key: value for key, value in about.items() if (key, value) != ("type", "string")}
    if not rules:
        del schema["propertyNames"]
    elif rules.keys() == {"not"} and (names := _names(rules["not"])) is not None:
        del schema["propertyNames"]
        if "properties" not in schema:  # that it lists none leaves it open
            schema.setdefault("additionalProperties", True)
        schema["properties"] = listed | dict.fromkeys(names, False)
    elif "patternProperties" not in schema:
        _allow(schema, rules, listed)


def _allow(schema: JsonObject, rules: JsonObject, listed: JsonObject) -> None:
    others = schema.get("additionalProperties", True)
    names, pattern = _names(rules), rules.get("pattern")
    fewest, most = rules.get("minLength", 0), rules.get("maxLength", math.inf)
    hidden = list[str]()
    if names is not None:
        listed |= {name: others for name in required(schema) if name in {*names} - {*listed}}
        schema["properties"] = listed  # what comes once is no pattern: nothing could follow it
        hidden = [name for name in listed if name not in names]
        rest = [re.escape(name) for name in names if name not in listed]  # in any order
        pattern = f"^({'|'.join(rest)})$" if rest else None
    elif rules.keys() <= {"minLength", "maxLength"} and (not listed or others in (True, {})):
        if not isinstance(fewest, int) or (most != math.inf and not isinstance(most, int)):
            return
        hidden = [name for name in listed if not fewest <= len(name) <= most]
        pattern = f"^{ANY}{{{fewest},{'' if most == math.inf else most}}}$"
    elif listed or rules.keys() != {"pattern"} or not isinstance(pattern, str):
        return
    del schema["propertyNames"]
    if hidden:
        schema["properties"] = listed | dict.fromkeys(hidden, False)
    if pattern is not None:
        schema["patternProperties"] = {pattern: others}
    schema["additionalProperties"] = False


def _names(schema: object) -> list[str] | None:
    """Those that it lists, if that is all."""
    if not isinstance(schema, dict) or not schema.keys() <= {"const", "enum", "type"}:
        return None
    names = [schema["const"]] if "const" in schema else schema.get("enum")
    if (
        {"const", "enum"} <= schema.keys()
        or not isinstance(names, list)
        or schema.get("type", "string") != "string"
    ):
        return None
    return [name for name in names if isinstance(name, str)]
