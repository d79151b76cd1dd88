"""Time-outs of a run of the swarm: no two of them are always equal, so that one in the place of
another shows.

In every draw a heartbeat is shorter than the time to suspect, that shorter than the time to lose.
A step of ranks is shorter than the clock of the last resort.  Clients' limits are not drawn: the
checker of deadlines lacks the time that machines slept.
"""

from __future__ import annotations

import msgspec

from epd.config import Timing
from epd_lab.sim.cluster import Settings
from epd_lab.sim.core.rand import KeyedRandom

TIMES = {
    "accept_timeout_s": (0.7, 1.0, 1.6), "stall_timeout_s": (4.0, 5.0, 7.0),
    "abort_timeout_s": (0.6, 1.0, 1.7), "link_timeout_s": (0.8, 1.0, 1.5),
    "retry_interval_s": (0.1, 0.2, 0.3), "tombstone_s": (7.0, 10.0, 13.0),
    "heartbeat_interval_s": (0.2, 0.4), "suspect_after_s": (0.9, 1.0, 1.3),
    "lost_after_s": (1.8, 2.0, 2.8), "drain_timeout_s": (2.0, 3.0, 4.5),
    "move_timeout_s": (1.0, 1.5, 2.5),
    "group_step_timeout_s": (1.2, 1.6, 2.0), "kv_lease_s": (0.5, 1.0, 1.9),
}  # fmt: skip


def draw(random: KeyedRandom) -> Timing:
    """Each by itself."""
    drawn = {name: random.pick(times, name) for name, times in TIMES.items()}
    return msgspec.structs.replace(Settings().timing, **drawn)
