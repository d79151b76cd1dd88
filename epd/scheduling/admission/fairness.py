"""Whose request is next: keys take turns by cost, so that none waits for another's thousand.

Theory of operation
-------------------
Deficit round robin (Shreedhar and Varghese 1995).  Each key has a line, and in each round a quantum
of seconds more to spend.  Its next request goes when it has saved up what that costs; a line that
is empty has saved nothing.  So keys that always have requests waiting get equal seconds, within the
cost of a few requests, whatever the sizes of theirs.  The quantum is what the largest of the next
ones costs, so a round lets somebody go.  In a line the order is that of the instances, by rank, so
priorities count among a key's own requests.

A request costs its amounts (patches, tokens) at the prices of when somebody goes, for prices of a
cluster that has just started are soon measured.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

Numbers = tuple[float, ...]  # amounts, or the seconds that one of each costs


def cost_s(amounts: Numbers, prices: Numbers) -> float:
    return sum(amount * price for amount, price in zip(amounts, prices, strict=True))


class _Waiting(NamedTuple):
    rank: float
    serial: int
    key: str
    amounts: Numbers


class FairQueue:
    """Of one gateway."""

    def __init__(self) -> None:
        self._lines: dict[str, list[_Waiting]] = {}  # by who asks; the next one's is the first
        self._saved_s: dict[str, float] = {}  # of the same
        self._who: dict[str, str] = {}  # by key of a request
        self._serial = 0

    def __len__(self) -> int:
        return len(self._who)

    def __contains__(self, key: str) -> bool:
        return key in self._who

    def cost_s(self, prices: Numbers) -> float:
        """Of all that wait."""
        return sum(cost_s(one.amounts, prices) for line in self._lines.values() for one in line)

    def join(self, key: str, who: str, rank: float, amounts: Numbers) -> None:
        self._serial += 1
        self._who[key] = who
        self._saved_s.setdefault(who, 0.0)
        insort(self._lines.setdefault(who, []), _Waiting(rank, self._serial, key, amounts))

    def leave(self, key: str) -> None:
        """Wherever it stands (idempotent)."""
        if (who := self._who.pop(key, None)) is not None:
            line = self._lines[who]
            line[:] = [one for one in line if one.key != key]
            self._forget_empty(who)

    def take(self, prices: Numbers) -> str | None:
        """The next one, which leaves; None: nobody waits."""
        costs = {who: cost_s(line[0].amounts, prices) for who, line in self._lines.items()}
        quantum_s = max(costs.values(), default=0.0)
        while self._lines:
            who, line = next(iter(self._lines.items()))
            if costs[who] <= self._saved_s[who]:
                one = line.pop(0)
                self._saved_s[who] -= costs[who]
                del self._who[one.key]
                self._forget_empty(who)
                return one.key
            self._lines[who] = self._lines.pop(who)
            self._saved_s[who] += quantum_s
        return None

    def _forget_empty(self, who: str) -> None:
        if not self._lines[who]:
            del self._lines[who], self._saved_s[who]
