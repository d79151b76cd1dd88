"""`propertyNames`, which llguidance does not know, as members by name or by pattern: exactly."""

from __future__ import annotations

import re

from epd.frontend import JsonObject


def name_members(schema: JsonObject) -> None:
    """Say the same without `propertyNames`, where that can be; rewrites `schema`."""
    about = schema.get("propertyNames")
    if about is True:
        about = {}
    if not isinstance(about, dict) or about.get("type", "string") != "string":
        return
    rules = {key: value for key, value in about.items() if key != "type"}
    others = schema.get("additionalProperties", True)
    if not rules:
        del schema["propertyNames"]
    elif schema.keys().isdisjoint(("properties", "patternProperties")):
        names = [rules["const"]] if "const" in rules else rules.get("enum")
        pattern = rules.get("pattern")
        if isinstance(names, list):  # in any order
            texts = (re.escape(name) for name in names if isinstance(name, str))
            pattern = f"^({'|'.join(texts)})$"
        if len(rules) == 1 and isinstance(pattern, str):
            del schema["propertyNames"]
            schema |= {"patternProperties": {pattern: others}, "additionalProperties": False}
