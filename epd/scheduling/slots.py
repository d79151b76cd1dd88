"""How registered memory is cut into slots for embedding rows.

A slot holds whole rows, so that an image's rows may lie in any slots in any order.  By default
there are `DEFAULT_ROWS`: a small image wastes little, and a large one needs few copies.

Sizes that are not configured follow from the model: rows differ in width by a factor of twenty, so
a pool for one model may hold no image of another.
"""

from __future__ import annotations

from epd.config import PrefillConfig

DEFAULT_ROWS = 64
POOL_ROWS = 8192  # of a receive pool: four images of 1920x1080
CACHE_ROWS = 16384  # of an encoder's device tier


def rows_per_slot(slot_nbytes: int, row_nbytes: int) -> int:
    """`slot_nbytes` 0: the default for the model's row width."""
    return max(1, slot_nbytes // row_nbytes) if slot_nbytes else DEFAULT_ROWS


def receive_pool(config: PrefillConfig, row_nbytes: int) -> tuple[int, int]:
    """How many slots, and rows of each."""
    rows = rows_per_slot(config.slot_nbytes, row_nbytes)
    nbytes = sized(config.pool_nbytes, POOL_ROWS, row_nbytes)
    return max(1, nbytes // (rows * row_nbytes)), rows


def sized(nbytes: int, num_rows: int, row_nbytes: int) -> int:
    """`nbytes`, or what `num_rows` rows take where that is 0."""
    return nbytes or num_rows * row_nbytes
