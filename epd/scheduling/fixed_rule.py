"""Placement by counts of open attempts: the fixed rule, to compare with.

An image goes to the prefill instance itself, if that can encode.  Else bounded-load rendezvous
hashing on `mm_hash` takes it to an encoder, so that equal images meet.  An encoder with more than
`BALANCE` times one above the mean is passed over (Thaler and Ravishankar 1998; bounded loads:
Mirrokni, Thorup, Zadimoghaddam 2016).

Prefill by load and by the prompt's beginning: an instance costs its open attempts, plus the share
of the prompt that it does not hold, times `_worth`.  So an instance that holds all of it is chosen
until it has that many attempts more than the least busy one: a popular beginning spreads.  Among
instances that encode also by the images that they have; decode in the same way, equal ones by free
KV blocks.  An instance that can take the next stage itself is preferred when it is not busier than
the others: the hop is then local, a reference and no copy.

Sources: the cost of Dynamo's KV router (overlap against load), the balance thresholds of SGLang's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from epd.scheduling.placement import Candidate, Image, Needs, Shares, busyness, weight

BALANCE = 1.25
AFFINITY_SLACK = 1  # attempts more than the least busy prefill that images are worth
PREFIX_SLACK = 2.0  # attempts more than others have that a whole prefix is worth,
PREFIX_BALANCE = 0.25  # and this share of the mean


class FixedRule:
    """See `placement.Rule`."""

    def __init__(self, asked: Needs, candidates: Sequence[Candidate]) -> None:
        self._asked = asked

    def prefill(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Candidate:
        """The one that costs least, or one hardly more that has more of the images itself."""
        known, costs = self._asked.known, _costs(prefills, self._asked.held)
        least = min(prefills, key=lambda c: (costs[c.instance_id], *busyness(c)))
        has: Counter[str] = Counter()
        for image in self._asked.images:
            has.update({*known.in_flight(image.mm_hash), *known.resident(image.mm_hash)})
        limit = costs[least.instance_id] + AFFINITY_SLACK
        near = [c for c in prefills if costs[c.instance_id] <= limit]
        return min(near, key=lambda c: (-has[c.instance_id], costs[c.instance_id], *busyness(c)))

    def decode(self, prefill: Candidate, decodes: Sequence[Candidate]) -> Candidate:
        costs = _costs(decodes, self._asked.held)
        best = min(
            decodes, key=lambda c: (costs[c.instance_id], -c.load.free_kv_blocks, c.instance_id)
        )
        if prefill in decodes:
            return prefill if prefill.assigned <= best.assigned + 1 else best
        return best

    def encoder(self, image: Image, encoders: Sequence[Candidate], prefill: Candidate) -> Candidate:
        if prefill in encoders:
            return prefill
        mean = sum(c.assigned for c in encoders) / len(encoders)
        allowed = [c for c in encoders if c.assigned <= BALANCE * (mean + 1)]
        return max(allowed, key=lambda c: weight(image.mm_hash, c.instance_id))


def _worth(candidates: Sequence[Candidate]) -> float:
    """Of a whole prefix, in open attempts."""
    mean = sum(c.assigned for c in candidates) / len(candidates)
    return PREFIX_SLACK + PREFIX_BALANCE * mean


def _costs(candidates: Sequence[Candidate], held: Shares) -> dict[str, float]:
    """Attempts to wait for, and what is left to compute as a part of one."""
    worth = _worth(candidates)
    return {
        c.instance_id: c.assigned + worth * (1.0 - held.get(c.instance_id, 0.0)) for c in candidates
    }
