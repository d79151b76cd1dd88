"""A schema that every generated JSON of the tests follows, whatever the model."""

from __future__ import annotations

import json

RECEIPT = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 8},
        "total": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["food", "drink", "other"]},
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["shop", "total", "kind", "items"],
    "additionalProperties": False,
}


def is_receipt(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == RECEIPT["required"]
        and len(found["shop"]) <= 8
        and 0 <= found["total"] <= 9999
        and found["kind"] in ("food", "drink", "other")
        and len(found["items"]) <= 3
        and all(isinstance(item, bool) for item in found["items"])
    )
