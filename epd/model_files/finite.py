"""Numbers of constrained JSON are read back: integers by 64 bits, others by a finite float.

Theory of operation
-------------------
A schema bounds the value of a number for llguidance, not its text: `521e406759` is a number there,
and infinity to whoever reads it.  So a grammar has a second matcher, with any JSON in the place of
each schema, whose numbers have few digits and a small exponent.  What both admit may follow.  The
second admits all that the first does, but for too long numbers, and each may end before its bound
(multiples: `api.schema`): no answer gets stuck.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# As json.dumps writes it, which is what models have read most of.
SPACING: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# 10^19 fits 64 bits.  So many digits and an exponent of 99, or one and 307, stay below 10^308.
_SMALL = "-([0-9]{1,2}|[12][0-9]{2}|3[01][0-9]|32[0-4])"
_NUMBER = (
    rf"-?(0|[1-9][0-9]{{0,18}})(\.[0-9]+)?([eE]([+]?[0-9]{{1,2}}|{_SMALL}))?"
    r"|-?[0-9](\.[0-9]+)?[eE][+]?([12][0-9]{2}|30[0-7])"
    r"|-?1(\.([0-6][0-9]*|7[0-8]?|7976931348623157))?[eE][+]?308"
)
_RULES = rf"""
finite_json: FINITE_TEXT | FINITE_NUMBER | "true" | "false" | "null" | finite_array | finite_object
finite_array: "[" (finite_json (", " finite_json)*)? "]"
finite_object: "{{" (finite_member (", " finite_member)*)? "}}"
finite_member: FINITE_TEXT ": " finite_json
FINITE_TEXT: /"(\\(?s:.)|[^"\\])*"/
FINITE_NUMBER: /{_NUMBER}/
"""
_HEAD = '%llguidance {"no_forcing": true}\n'  # what is forced there is one token of several here
_SCHEMA = "%json "


def loosened(grammar: str) -> str:
    """The grammar of the second matcher; empty: the first has no schema."""
    if grammar.startswith("{"):  # a schema, or a regular expression
        (whole,) = json.loads(grammar)["grammars"]
        return f"{_HEAD}start: finite_json{_RULES}" if whole.get("json_schema") else ""
    found, end = "", 0
    while (at := grammar.find(_SCHEMA, end)) >= 0:
        found, begin, end = found + grammar[end:at], at, at + len(_SCHEMA)
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, end)
            is_ours = isinstance(schema, dict) and schema.get("x-guidance") == SPACING
        except ValueError:
            is_ours = False
        found += "finite_json" if is_ours else grammar[begin:end]
    return f"{_HEAD}{found}{grammar[end:]}{_RULES}" if "finite_json" in found else ""
