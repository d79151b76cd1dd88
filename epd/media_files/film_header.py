"""A video's container, read by a reader of our own before FFmpeg gets a byte (F46, F67).

Theory of operation
-------------------
FFmpeg believes a header: 1 KB that announced 40 million samples took it 2.9 GiB.  So each container
has a walk (`isom`, `matroska`, `avi`) that reads the one track of pictures that is used.  It checks
each size against what is around it, each count against the bytes that are there, and all that
becomes a list against `MAX_PARTS`.  Whatever else there is, it hides: overwritten in place with the
container's own name for nothing.  So FFmpeg sees what was checked, and no more.

The gateway takes its data from here alone: no frame is decoded there.  A walk takes milliseconds,
at most some tenths of a second for the longest film.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.errors import MediaError

MAX_PARTS = 1 << 18  # frames, and boxes or blocks: 2.4 hours at 30 frames per second

_BROADCAST = tuple(rate * 1000 / 1001 for rate in (24, 30, 48, 60, 120))


@dataclass(frozen=True, slots=True)
class FilmHeader:
    """The track that is used."""

    width: int  # as it is stored, before it is turned
    height: int
    num_frames: int
    fps: float  # 0: not told
    turns: int = 0  # quarter turns counterclockwise that a player makes
    # Frames outside of these are not shown: begin and end in units of the track, in order.
    shown: tuple[tuple[float, float], ...] = ()

    def shows(self, time: float) -> bool:
        """Whether its edits leave a frame of this time in the film."""
        return not self.shown or any(begin <= time < end for begin, end in self.shown)


Hide = Callable[[int, bytes], None]  # overwrites: at an offset of the file, with bytes


class Walk:
    """One walk through a file."""

    def __init__(self, data: memoryview, hide: Hide | None = None) -> None:
        self.data = data
        self.hide: Hide = hide or (lambda at, data: None)
        self._num_parts = 0

    def count(self, number: int = 1) -> None:
        """Parts were found that a reader keeps or stops at.  Raises MediaError."""
        self._num_parts += number
        if self._num_parts > MAX_PARTS:
            raise MediaError(f"has more than {MAX_PARTS} parts; send a shorter video")

    def held(self, begin: int, nbytes: int, end: int) -> int:
        """The end of so many bytes, which must not be behind `end`.  Raises MediaError."""
        if nbytes < 0 or begin + nbytes > end:
            raise MediaError("is cut off or damaged; send a whole file")
        return begin + nbytes


def usual_rate(times_s: Sequence[float]) -> float:
    """Frames per second of a file that has times alone, rounded to milliseconds; 0: none.

    A rate within 1% of a usual one is taken for that, as FFmpeg does.
    """
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    if span_s <= 0:
        return 0.0
    rate = (len(times_s) - 1) / span_s
    nearest = min((*_BROADCAST, max(1, round(rate))), key=lambda usual: abs(usual - rate))
    return float(nearest) if abs(nearest - rate) < nearest / 100 else rate
