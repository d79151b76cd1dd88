"""Placement: which instances serve an attempt.  Pure policy over the registry's view.

An image goes, in this order: to the encoder that an open attempt has sent it to and that has not
said yet that it holds the rows, whatever its load, for joining an encode costs nothing; to an
encoder that holds its rows, unless that has more than `RESIDENT_BALANCE` times the mean load; to
the prefill instance itself, if that can encode; else by bounded-load rendezvous hashing on
`mm_hash` (Thaler and Ravishankar 1998; bounded loads: Mirrokni, Thorup, Zadimoghaddam 2016), so
that equal images meet, but an encoder with more than `BALANCE` times the mean is passed over.

A prefill instance that reads the storage of encoders (`finds_rows`) serves an image that is there
itself, without an encoder; where there is no encoder it is asked for any image.

Prefill by load and by the prompt's beginning: an instance costs its open attempts, plus what it
would have to compute, the share of the prompt that it does not hold times `_worth`.  So who holds
all of it is chosen until it has so many attempts more than the least busy one, and passed from
there on: a popular beginning spreads, and nobody waits for a cache.  Among instances that encode
also by the images that they have; decode in the same way, equal ones by free KV blocks.  An
instance that can take the next stage itself is preferred when it is not busier than the others:
the hop is then local, a reference and no copy.

A pair of instances that do not hear each other (one of them says so) is taken only if there is no
other: the rest of the cluster may reach both, so neither is passed over as such.

What is known of rows and prefixes may be stale.  That costs their computing, never an answer: only
candidates are chosen, and the image always travels with its request.

Sources: the cost of Dynamo's KV router (overlap against load), the balance thresholds of SGLang's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from epd.messages import Address, InstanceInfo, Load
from epd.scheduling.residency import Nowhere, Whereabouts

BALANCE = 1.25
RESIDENT_BALANCE = 2.0
AFFINITY_SLACK = 1  # attempts more than the least busy prefill that images are worth
PREFIX_SLACK = 2.0  # attempts more than others have that a whole prefix is worth,
PREFIX_BALANCE = 0.25  # and this share of the mean
NOWHERE = Nowhere()
Shares = Mapping[str, float]  # instance to the share of the prompt that it likely holds, 0 to 1
NOTHING_HELD: Shares = {}
PickEncoder = Callable[[Sequence["Candidate"]], "Candidate"]


class Candidate:
    """An instance that takes work, with its load as heartbeats and the gateway's own books say."""

    __slots__ = ("assigned", "info", "instance_id", "load", "roles")

    def __init__(self, info: InstanceInfo, load: Load, assigned: int) -> None:
        self.info = info
        self.load = load
        self.assigned = assigned  # open attempts that the gateway has placed there
        self.instance_id = info.address.instance_id
        self.roles = info.roles


@dataclass(frozen=True, slots=True)
class Placement:
    """One attempt's instances; `encoders` in the order of its items."""

    encoders: tuple[Address, ...]
    prefill: Address
    decode: Address

    def instances(self) -> frozenset[str]:
        return frozenset(
            address.instance_id for address in (*self.encoders, self.prefill, self.decode)
        )

    def moved(self, index: int, encoder: Address) -> Placement:
        """With another encoder for one of the images."""
        before, behind = self.encoders[:index], self.encoders[index + 1 :]
        return replace(self, encoders=(*before, encoder, *behind))

    def addresses(self) -> tuple[Address, ...]:
        """Each instance once, in a fixed order."""
        unique = {a.instance_id: a for a in (self.prefill, self.decode, *self.encoders)}
        return tuple(unique.values())


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No topology can serve it now; `reason` says what is missing."""

    reason: str


def lacking(infos: Iterable[InstanceInfo], *, with_images: bool, finds: bool) -> str:
    """Why these instances cannot serve, with the roles that none of them has; empty: they can.

    `finds`: rows may be in a storage that some of them read.
    """
    infos = list(infos)
    roles = {role for info in infos for role in info.roles}
    if finds and any(info.finds_rows for info in infos):
        roles.add("encode")
    needed = ("prefill", "decode", "encode") if with_images else ("prefill", "decode")
    missing = [role for role in needed if role not in roles]
    return f"no healthy instance has the role {' or '.join(missing)}" if missing else ""


def place(
    candidates: Sequence[Candidate],
    mm_hashes: Sequence[str],
    avoid: Collection[str] = (),
    known: Whereabouts = NOWHERE,
    held: Shares = NOTHING_HELD,
    *,
    finds: bool = True,
    at: str = "",
    pick: PickEncoder | None = None,
) -> Placement | Unplaceable:
    """Choose; instances in `avoid` (they just failed it) only if there is no other.

    `finds`: False where storage was asked for these images and did not have them.  `at`: the
    prefill instance that holds the prompt for it.  `pick` takes an encoder for each image
    whatever is known of it (`encode_policy.py`).
    """
    infos = [c.info for c in candidates]
    if reason := lacking(infos, with_images=bool(mm_hashes), finds=finds):
        return Unplaceable(reason)
    ordered = sorted(candidates, key=attrgetter("instance_id"))
    prefills = _prefer([c for c in ordered if "prefill" in c.roles], avoid)
    decodes = _prefer([c for c in ordered if "decode" in c.roles], avoid)
    encoders = _prefer([c for c in ordered if "encode" in c.roles], avoid)
    if mm_hashes and not encoders:
        prefills = [c for c in prefills if c.info.finds_rows] or [
            c for c in ordered if c.info.finds_rows
        ]
    needed = [them for them in (decodes, encoders if mm_hashes else []) if them]
    prefills = [p for p in prefills if all(_reached(p, them) for them in needed)] or prefills
    prefills = [c for c in prefills if c.instance_id == at] or prefills
    prefill = _prefill_for(mm_hashes, prefills, known, held)
    decode = _decode_for(prefill, _reached(prefill, decodes) or decodes, held)
    encoders = _reached(prefill, encoders) or encoders
    finder = prefill if finds and prefill.info.finds_rows else None
    chosen = tuple(
        _encoder_for(h, encoders, prefill, finder, known, pick).info.address for h in mm_hashes
    )
    return Placement(chosen, prefill.info.address, decode.info.address)


def another_encoder(
    candidates: Sequence[Candidate],
    mm_hash: str,
    at: Address,
    but: Collection[str],
    known: Whereabouts = NOWHERE,
) -> Address | None:
    """For one image of an attempt that goes on, which its encoder fails; `at` computes its prompt.
    None of `but`; None: there is no other that both sides hear."""
    ordered = sorted(candidates, key=attrgetter("instance_id"))
    encoders = [c for c in ordered if "encode" in c.roles and c.instance_id not in but]
    prefill = next((c for c in ordered if c.info.address == at), None)
    if prefill is None or not (encoders := _reached(prefill, encoders)):
        return None
    return _encoder_for(mm_hash, encoders, prefill, None, known, None).info.address


def _prefer(candidates: list[Candidate], avoid: Collection[str]) -> list[Candidate]:
    return [c for c in candidates if c.instance_id not in avoid] or candidates


def _reached(prefill: Candidate, others: list[Candidate]) -> list[Candidate]:
    """Those that hear it, and that it hears, as far as is known."""
    silent = prefill.load.silent_peers
    return [
        c
        for c in others
        if c.instance_id not in silent and prefill.instance_id not in c.load.silent_peers
    ]


def _busyness(candidate: Candidate) -> tuple[int, int, str]:
    return (candidate.assigned, candidate.load.open_requests, candidate.instance_id)


def _worth(candidates: list[Candidate]) -> float:
    """Of a whole prefix, in open attempts."""
    mean = sum(c.assigned for c in candidates) / len(candidates)
    return PREFIX_SLACK + PREFIX_BALANCE * mean


def _costs(candidates: list[Candidate], held: Shares) -> dict[str, float]:
    """Attempts to wait for, and what is left to compute as a part of one."""
    worth = _worth(candidates)
    return {
        c.instance_id: c.assigned + worth * (1.0 - held.get(c.instance_id, 0.0)) for c in candidates
    }


def _decode_for(prefill: Candidate, decodes: list[Candidate], held: Shares) -> Candidate:
    costs = _costs(decodes, held)
    best = min(decodes, key=lambda c: (costs[c.instance_id], -c.load.free_kv_blocks, c.instance_id))
    if prefill in decodes:
        return prefill if prefill.assigned <= best.assigned + 1 else best
    return best


def _prefill_for(
    mm_hashes: Sequence[str], prefills: list[Candidate], known: Whereabouts, held: Shares
) -> Candidate:
    """The one that costs least, or one hardly more that has more of the images itself."""
    costs = _costs(prefills, held)
    least = min(prefills, key=lambda c: (costs[c.instance_id], *_busyness(c)))
    has: Counter[str] = Counter()
    for mm_hash in mm_hashes:
        has.update({*known.in_flight(mm_hash), *known.resident(mm_hash)})
    limit = costs[least.instance_id] + AFFINITY_SLACK
    near = [c for c in prefills if costs[c.instance_id] <= limit]
    return min(near, key=lambda c: (-has[c.instance_id], costs[c.instance_id], *_busyness(c)))


def _encoder_for(
    mm_hash: str,
    encoders: list[Candidate],
    prefill: Candidate,
    finder: Candidate | None,
    known: Whereabouts,
    pick: PickEncoder | None,
) -> Candidate:
    """`finder`: prefill itself, where it may find the rows without an encoder."""
    if finder is not None:
        places = (*known.resident(mm_hash), *known.in_flight(mm_hash))
        if not encoders or finder.instance_id in places:
            return finder
    if pick is not None:
        return pick(encoders)
    by_name = {c.instance_id: c for c in encoders}
    holders = [by_name[name] for name in known.resident(mm_hash) if name in by_name]
    for name in known.in_flight(mm_hash):
        if name in by_name and by_name[name] not in holders:
            return by_name[name]
    mean = sum(c.assigned for c in encoders) / len(encoders)
    near = [c for c in holders if c.assigned <= RESIDENT_BALANCE * (mean + 1)]
    if near:
        return min(near, key=lambda c: (c is not prefill, _busyness(c)))
    if prefill in encoders:
        return prefill
    allowed = [c for c in encoders if c.assigned <= BALANCE * (mean + 1)]
    return max(allowed, key=lambda c: _weight(mm_hash, c.instance_id))


def _weight(mm_hash: str, instance_id: str) -> bytes:
    return hashlib.blake2b(f"{mm_hash}/{instance_id}".encode(), digest_size=8).digest()
