"""Grammars of which llguidance 1.9.1 dies or finds no end, each small."""

from __future__ import annotations

DEEP = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1000)}
    | {"d1000": {"type": "null"}},
}
SLOW = 'start: %json {"type": "integer", "multipleOf": 1234577}'  # no schema of a field is so


def chain(length: int, name: str = "r") -> str:
    """Rules, or terminals, each of which is the next."""
    rules = "".join(f"{name}{i}:{name}{i + 1}\n" for i in range(length))
    return f'start:{name}0\n{rules}{name}{length}:"b"'


CHAIN, TERMINALS = chain(4000), chain(4000, "A")
