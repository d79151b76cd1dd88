"""When an instance should have other roles: by the work that waits, with hysteresis.

Theory of operation
-------------------
Instances of equal roles are a kind.  A kind's load is the predicted time of what waits there, per
instance.  Where one kind has `RATIO` times the load of another, one instance of the second moves to
the first.  Three bounds keep it from moving back and forth.  The ratio has to last, and moves are
apart.  Without it, its kind must have less load than the other one with it.  A kind never loses its
last instance.

`epd sim drill roles-by-backlog` shows it at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RATIO = 4.0
LEAST_S = 1.0  # of what waits at an instance: less is over before an instance has moved


class RoleLoad(NamedTuple):
    """An instance that takes work, and the time of what waits there."""

    instance: str
    roles: tuple[str, ...]
    load_s: float


class Move(NamedTuple):
    instance: str
    roles: tuple[str, ...]


class RoleBalance:
    """Of one cluster; `hold_s`: so long a ratio lasts; `apart_s`: between two moves."""

    def __init__(self, hold_s: float, apart_s: float) -> None:
        self._hold_s, self._apart_s = hold_s, apart_s
        self._wanted: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # from and to
        self._since_s = self._moved_s = float("-inf")

    def look(self, now_s: float, stations: Sequence[RoleLoad]) -> Move | None:
        """The move that is due, if one is; it counts as made."""
        pair = _pair(stations)
        if pair != self._wanted:
            self._wanted, self._since_s = pair, now_s
        is_early = now_s - self._since_s < self._hold_s or now_s - self._moved_s < self._apart_s
        if pair is None or is_early:
            return None
        self._wanted, self._moved_s = None, now_s
        least = min((s.load_s, s.instance) for s in stations if s.roles == pair[0])
        return Move(least[1], pair[1])


def _pair(stations: Sequence[RoleLoad]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Roles of the kind that has an instance to give, and of the one that needs it."""
    kinds: dict[tuple[str, ...], list[float]] = {}
    for one in stations:
        kinds.setdefault(one.roles, []).append(one.load_s)
    means = {roles: sum(loads) / len(loads) for roles, loads in kinds.items()}
    needy = max(means, key=lambda roles: (means[roles], roles), default=())
    givers = [
        roles
        for roles, loads in kinds.items()
        if len(loads) > 1
        and LEAST_S <= means[needy] >= RATIO * means[roles]
        and sum(loads) / (len(loads) - 1) < sum(kinds[needy]) / (len(kinds[needy]) + 1)
    ]
    giver = min(givers, key=lambda roles: (means[roles], roles), default=None)
    return None if giver is None else (giver, needy)
