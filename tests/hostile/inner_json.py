"""JSON texts that a body carries as a string: edges of numbers and strings, cut, mixed up, deep."""

from __future__ import annotations

import json
import random

ATOMS = (
    *("0", "-0", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "-Infinity", "01", "+1", "1."),
    *(".5", "9" * 25, "9" * 5000, "1" + "0" * 400, "1.7976931348623159e308", "5e-324", "-"),
    *("true", "null", "nul", "True", "undefined", "''", "{}", "[]", "[,]", '{"a":}', "{1: 2}"),
    *("{a: 1}", '"x"', '"é"', '"\x00"', '"\n"', '"\\ud83d"', '"\\udc00\\ud83d"', '"\\u12"', ""),
    *('"\\x"', '"\\"', '"</tool_call>"', '"<|im_end|>"', '"{{7*7}}{% raw %}"', "\ufeff1", "1 2"),
    *("//", '"\\ud83d\\ude00"', '{"a": 1, "a": "\\ud83d"}', "0.1e+05"),
)
KEYS = ('"a"', '"\\ud83d"', '"<|im_start|>"', '"é"', '""', '"\\u0000"', "a", '"__proto__"')
LITTER = ("", "\x00", ",", "}", "]", '"', "\\", "\\u", "\\ud800", "NaN", "e999", " ", "\ufeff")


def text(seed: int) -> str:
    draw = random.Random(seed)
    found = _value(draw, 0)
    if draw.random() < 0.05:
        count = int(10 ** draw.uniform(0, 4.5))
        found = "[" * count + found + "]" * count
    if draw.random() < 0.3:
        at = draw.randrange(len(found) + 1)
        found = found[:at] + draw.choice(LITTER) + found[at + draw.randrange(3) :]
    return found


def schema_text(seed: int) -> str:
    """Of a schema in which such a value stands where one may."""
    draw = random.Random(seed)
    place = draw.choice(('{"const": %s}', '{"enum": [%s]}', '{"properties": {"a": %s}}', "%s"))
    return place % text(draw.getrandbits(32))


def _value(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth > 3 or kind < 0.5:
        if draw.random() < 0.6:
            return json.dumps(draw.choice((1, "x", "é", None, True, -2.5, {"a": [1]})))
        return draw.choice(ATOMS)
    parts = [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind < 0.7:
        return f"[{', '.join(parts)}]"
    return "{" + ", ".join(f"{draw.choice(KEYS)}: {part}" for part in parts) + "}"
