"""When rows are late, and whether a second encoder is asked for them.  Pure policy.

Theory of operation
-------------------
Rows are late when they take longer than nearly all that came lately (Dean and Barroso, "The tail at
scale", 2013).  A prefill instance measures the time of loads, for each row, by encoder
(`LoadTimes`).  The encoder with the fastest slow loads sets the bound, since the hedge may be as
fast: the times of a slow encoder excuse none.

The gateway decides whether one is asked.  `HedgeBudget` is a small token bucket, as in Finagle's
retries and gRPC's hedging: each sent image adds a share of a token, a hedge takes one.  So hedges
are at most `BURST` and that share of all images, however many are late.  `pays`: the other
encoder's queue ends before the late one has been waited for twice as long.  Where all are busy, one
more would only make all of them later.
"""

from __future__ import annotations

from collections import deque

from epd.messages import StageCosts
from epd.scheduling.backlog import Backlog

BURST = 5
MARGIN = 2.0  # times the percentile: loads of unlike sizes do not cost quite the same for each row
QUANTILE = 0.99
REMEMBERED = 128  # loads of each encoder


class LoadTimes:
    """Of the youngest loads of one prefill instance."""

    def __init__(self, min_loads: int, floor_s: float) -> None:
        """An encoder counts from `min_loads` loads on; nothing is late before `floor_s`."""
        self._min_loads = min_loads
        self._floor_s = floor_s
        self._row_s: dict[str, deque[float]] = {}  # by encoder: seconds for each row
        self._usual_s: dict[str, float] = {}  # of them, the quantile

    def note(self, encoder: str, num_rows: int, took_s: float) -> None:
        times = self._row_s.setdefault(encoder, deque(maxlen=REMEMBERED))
        times.append(took_s / max(1, num_rows))
        self._usual_s.pop(encoder, None)

    def forget(self, encoder: str) -> None:
        """It is gone: nothing will be as fast, or as slow, as it was."""
        self._row_s.pop(encoder, None)
        self._usual_s.pop(encoder, None)

    def late_after_s(self, num_rows: int) -> float | None:
        """None: no encoder has enough loads."""
        usual_s = [
            self._usual(name) for name, t in self._row_s.items() if len(t) >= self._min_loads
        ]
        if not usual_s:
            return None
        return max(self._floor_s, MARGIN * min(usual_s) * num_rows)

    def _usual(self, encoder: str) -> float:
        if encoder not in self._usual_s:
            times = sorted(self._row_s[encoder])
            self._usual_s[encoder] = times[int(QUANTILE * (len(times) - 1))]
        return self._usual_s[encoder]


class HedgeBudget:
    """See the head of the module."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = float(BURST) if share else 0.0

    def sent(self, num_images: int) -> None:
        self._tokens = min(float(BURST), self._tokens + self._share * num_images)

    def take(self) -> bool:
        """False: none is left."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def pays(backlog: Backlog, costs: StageCosts, num_patches: int, waited_s: float) -> bool:
    """Whether an encoder with this before it would be done soon, with so many patches more, of an
    image that is waited for since `waited_s`."""
    images_s = costs.patch_s * (backlog.num_patches + num_patches)
    return images_s + costs.token_s * backlog.num_ready <= waited_s
