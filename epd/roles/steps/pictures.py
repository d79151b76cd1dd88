"""Where a chunk may end among pictures that are seen both ways.

Theory of operation
-------------------
Some families let the rows of a picture see each other in both directions.  Keys of all of them must
be there when the first is a query, so a chunk that has a picture's first rows has all of them.  One
that begins inside a picture is sound: the rows before it are computed, with all that they saw.
"""

from __future__ import annotations

from collections.abc import Iterable


def uncut(start: int, count: int, pictures: Iterable[tuple[int, int]]) -> int:
    """Tokens of a chunk of at most `count` behind the first `start`, so that no picture is cut.

    `pictures`: first place of each, and behind its last.  More than `count` where the chunk would
    hold nothing: a picture that is longer is computed at once.
    """
    stop = start + count
    for first, end in pictures:
        if first < stop < end:
            stop = first if first > start else end
            break
    return stop - start
