"""Placement: which instances serve an attempt.  Pure policy over the registry's view.

Encode by bounded-load rendezvous hashing on `mm_hash` (Thaler and Ravishankar 1998; bounded loads:
Mirrokni, Thorup, Zadimoghaddam 2016): equal pictures meet in one encoder and are encoded once, but
an encoder with more than `BALANCE` times the mean queue is passed over.  Prefill by load, decode by
free KV blocks.  An instance that can take the next stage itself is preferred when it is not busier
than the others: the hop is then local, a reference and no copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from epd.messages import Address, InstanceInfo, Load

BALANCE = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that takes work, with its load as heartbeats and the gateway's own books say."""

    info: InstanceInfo
    load: Load
    assigned: int  # open attempts that the gateway has placed there

    @property
    def instance_id(self) -> str:
        return self.info.address.instance_id

    def has(self, role: str) -> bool:
        return role in self.info.roles


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

    def addresses(self) -> tuple[Address, ...]:
        """Each instance once, in a fixed order."""
        unique = {a.instance_id: a for a in (self.prefill, self.decode, *self.encoders)}
        return tuple(unique.values())


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No topology can serve it now; `reason` says what is missing."""

    reason: str


def place(
    candidates: Sequence[Candidate], mm_hashes: Sequence[str], avoid: Collection[str] = ()
) -> Placement | Unplaceable:
    """Choose; instances in `avoid` (they just failed it) only if there is no other."""
    ordered = sorted(candidates, key=lambda c: c.instance_id)
    prefills = _prefer([c for c in ordered if c.has("prefill")], avoid)
    decodes = _prefer([c for c in ordered if c.has("decode")], avoid)
    encoders = _prefer([c for c in ordered if c.has("encode")], avoid)
    missing = [
        role
        for role, found in (("prefill", prefills), ("decode", decodes), ("encode", encoders))
        if not found and (role != "encode" or mm_hashes)
    ]
    if missing:
        return Unplaceable(f"no healthy instance has the role {' or '.join(missing)}")
    prefill = min(prefills, key=_busyness)
    decode = _decode_for(prefill, decodes)
    chosen = tuple(_encoder_for(h, encoders, prefill).info.address for h in mm_hashes)
    return Placement(chosen, prefill.info.address, decode.info.address)


def _prefer(candidates: list[Candidate], avoid: Collection[str]) -> list[Candidate]:
    return [c for c in candidates if c.instance_id not in avoid] or candidates


def _busyness(candidate: Candidate) -> tuple[int, int, str]:
    return (candidate.assigned, candidate.load.open_requests, candidate.instance_id)


def _decode_for(prefill: Candidate, decodes: list[Candidate]) -> Candidate:
    best = min(decodes, key=lambda c: (c.assigned, -c.load.free_kv_blocks, c.instance_id))
    if prefill.has("decode") and any(c is prefill for c in decodes):
        return prefill if prefill.assigned <= best.assigned + 1 else best
    return best


def _encoder_for(mm_hash: str, encoders: list[Candidate], prefill: Candidate) -> Candidate:
    if any(c is prefill for c in encoders):
        return prefill
    mean = sum(c.assigned for c in encoders) / len(encoders)
    allowed = [c for c in encoders if c.assigned <= BALANCE * (mean + 1)] or encoders
    return max(allowed, key=lambda c: _weight(mm_hash, c.instance_id))


def _weight(mm_hash: str, instance_id: str) -> bytes:
    return hashlib.blake2b(f"{mm_hash}/{instance_id}".encode(), digest_size=8).digest()
