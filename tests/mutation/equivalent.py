"""Mutants that no test can catch, because nothing that anybody may rely on is different: why not.

The names hold the function and the text, so they outlive changes elsewhere.
"""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "epd/fsm/kernel.py:Table._edge: edge.before[0] -> edge.before[-1]": "a row has one callback",
}
