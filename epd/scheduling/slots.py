"""How registered memory is cut into slots for embedding rows.

A slot holds whole rows, so that a picture's rows may lie in any slots in any order; by default as
many as `DEFAULT_ROWS`: few enough that a small picture wastes little, many enough that a large one
needs few copies.
"""

from __future__ import annotations

DEFAULT_ROWS = 64


def rows_per_slot(slot_nbytes: int, row_nbytes: int) -> int:
    """`slot_nbytes` 0: the default for the model's row width."""
    return max(1, slot_nbytes // row_nbytes) if slot_nbytes else DEFAULT_ROWS
