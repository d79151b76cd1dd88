"""Placement: which instances serve an attempt.  Pure policy over the registry's view.

Who may serve a stage is decided here; who does, by a `Rule`: by predicted completion
(`predicted_rule.py`, the default), or by counts of open attempts (`fixed_rule.py`).

An image goes, whatever the load, to the encoder that an open attempt has sent it to and that does
not hold the rows yet: joining an encode costs nothing.  Else it goes to an encoder that holds its
rows, unless that has more than `RESIDENT_BALANCE` times one above the mean load.  Else the rule
chooses.  Where several gateways have the encoders, none has a record of the images under way of
another.  Rendezvous hashing on `mm_hash` chooses then, so that equal images meet at one encoder.

A prefill instance that reads the storage of encoders (`finds_rows`) serves an image there without
an encoder; where there is no encoder it is asked for any image.

A pair of instances without a link, which one of them has reported, is taken only if there is no
other.  The rest of the cluster may reach both, so neither is passed over as such.

An instance that takes rows and has no layout of KV (a vLLM server) decodes what it prefills, and
nothing else: its KV does not move.

The records of rows and prefixes may be stale.  That costs their computing, never an answer: only
candidates are chosen, and the image always travels with its request.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

from epd.messages import Address, InstanceInfo, Load
from epd.scheduling.backlog import NOTHING_WAITS, Backlog
from epd.scheduling.residency import Nowhere, Whereabouts

RESIDENT_BALANCE = 2.0
NOWHERE = Nowhere()
Shares = Mapping[str, float]  # instance to the share of the prompt that it likely holds, 0 to 1
NOTHING_HELD: Shares = {}
PickEncoder = Callable[[Sequence["Candidate"]], "Candidate"]


class Candidate:
    """An instance that takes work, with its load by heartbeats and by the gateway's own books."""

    __slots__ = ("assigned", "backlog", "info", "instance_id", "load", "roles")

    def __init__(
        self,
        info: InstanceInfo,
        load: Load,
        assigned: int,
        backlog: Backlog = NOTHING_WAITS,
    ) -> None:
        self.info = info
        self.load = load
        self.assigned = assigned  # open attempts that the gateway has placed there
        self.backlog = backlog  # and their work
        self.instance_id = info.address.instance_id
        self.roles = info.roles


@dataclass(frozen=True, slots=True)
class Image:
    """One image or video of a prompt, and what it costs."""

    mm_hash: str
    num_patches: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of an attempt, and the places of its rows and KV."""

    images: Sequence[Image] = ()
    num_tokens: int = 0  # of its prompt
    max_tokens: int = 1  # of its answer
    known: Whereabouts = NOWHERE
    held: Shares = field(default_factory=dict)


class Rule(Protocol):
    """Chooses for one attempt, among instances that may serve a stage, in order of name."""

    def prefill(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Candidate: ...

    def decode(self, prefill: Candidate, decodes: Sequence[Candidate]) -> Candidate: ...

    def encoder(self, image: Image, encoders: Sequence[Candidate], prefill: Candidate) -> Candidate:
        """Asked for one image after the other: the ones before it count."""
        ...


MakeRule = Callable[[Needs, Sequence[Candidate]], Rule]


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
    """No topology can serve it now; `reason` names what is missing."""

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


def holding(
    candidates: Sequence[Candidate], adapter: str, *, changes_tower: bool = False
) -> list[Candidate]:
    """Without instances whose part of the model this adapter changes, and that do not hold it."""
    return [
        c
        for c in candidates
        if not adapter
        or not (c.info.kv_layout or (changes_tower and "encode" in c.roles))
        or adapter in c.load.adapters
    ]


def place(
    candidates: Sequence[Candidate],
    asked: Needs,
    make_rule: MakeRule,
    avoid: Collection[str] = (),
    *,
    finds: bool = True,
    at: str = "",
    pick: PickEncoder | None = None,
) -> Placement | Unplaceable:
    """Choose; instances in `avoid` (they just failed it) only if there is no other.

    `finds`: False where storage was asked for these images and did not have them.  `at`: the
    prefill instance that holds the prompt for it.  `pick` takes an encoder for each image, wherever
    its rows are (`pick_encoder`).
    """
    images, known = asked.images, asked.known
    infos = [c.info for c in candidates]
    if reason := lacking(infos, with_images=bool(images), finds=finds):
        return Unplaceable(reason)
    ordered = sorted(candidates, key=attrgetter("instance_id"))
    rule = make_rule(asked, ordered)
    prefills = _prefer([c for c in ordered if "prefill" in c.roles], avoid)
    decodes = _prefer([c for c in ordered if "decode" in c.roles], avoid)
    encoders = _prefer([c for c in ordered if "encode" in c.roles], avoid)
    if images and not encoders:
        prefills = [c for c in prefills if c.info.finds_rows] or [
            c for c in ordered if c.info.finds_rows
        ]
    needed = [them for them in (decodes, encoders if images else []) if them]
    prefills = [p for p in prefills if all(_reached(p, them) for them in needed)] or prefills
    prefills = [c for c in prefills if c.instance_id == at] or prefills
    prefill = prefills[0] if len(prefills) == 1 else rule.prefill(prefills, decodes)
    decodes = _decoding(prefill, _reached(prefill, decodes) or decodes)
    decode = decodes[0] if len(decodes) == 1 else rule.decode(prefill, decodes)
    encoders = _reached(prefill, encoders) or encoders
    finder = prefill if finds and prefill.info.finds_rows else None
    chosen: list[Address] = []
    again: dict[str, Address] = {}  # an image that the prompt has twice is encoded once
    for image in images:
        if pick is not None or image.mm_hash not in again:
            encoder = _encoder_for(image, encoders, prefill, finder, known, pick, rule)
            again[image.mm_hash] = encoder.info.address
        chosen.append(again[image.mm_hash])
    return Placement(tuple(chosen), prefill.info.address, decode.info.address)


def another_encoder(
    candidates: Sequence[Candidate],
    image: Image,
    make_rule: MakeRule,
    at: Address,
    but: Collection[str],
    known: Whereabouts = NOWHERE,
) -> Address | None:
    """For one image of an attempt that goes on, which its encoder fails; `at` computes its prompt.
    None of `but`; None: there is no other with links both ways."""
    ordered = sorted(candidates, key=attrgetter("instance_id"))
    encoders = [c for c in ordered if "encode" in c.roles and c.instance_id not in but]
    prefill = next((c for c in ordered if c.info.address == at), None)
    if prefill is None or not (encoders := _reached(prefill, encoders)):
        return None
    rule = make_rule(Needs((image,), known=known), ordered)
    return _encoder_for(image, encoders, prefill, None, known, None, rule).info.address


def _prefer(candidates: list[Candidate], avoid: Collection[str]) -> list[Candidate]:
    return [c for c in candidates if c.instance_id not in avoid] or candidates


def _reached(prefill: Candidate, others: list[Candidate]) -> list[Candidate]:
    """Those with links both ways: neither side has reported the other as silent."""
    silent = prefill.load.silent_peers
    return [
        c
        for c in others
        if c.instance_id not in silent and prefill.instance_id not in c.load.silent_peers
    ]


def _keeps_kv(one: Candidate) -> bool:
    return one.info.kv_layout is None and one.info.num_slots > 0


def _decoding(prefill: Candidate, decodes: list[Candidate]) -> list[Candidate]:
    """Those to which KV of this one can go."""
    if _keeps_kv(prefill):
        return [prefill]
    return [c for c in decodes if not _keeps_kv(c)] or decodes


def busyness(candidate: Candidate) -> tuple[int, int, str]:
    """By counts, for those that are equal in all else."""
    return (candidate.assigned, candidate.load.open_requests, candidate.instance_id)


def _encoder_for(
    image: Image,
    encoders: list[Candidate],
    prefill: Candidate,
    finder: Candidate | None,
    known: Whereabouts,
    pick: PickEncoder | None,
    rule: Rule,
) -> Candidate:
    """`finder`: prefill itself, where it may find the rows without an encoder."""
    mm_hash = image.mm_hash
    if finder is not None:
        places = (*known.resident(mm_hash), *known.in_flight(mm_hash))
        if not encoders or finder.instance_id in places:
            return finder
    if pick is not None:
        return pick(encoders)
    if len(encoders) == 1:
        return encoders[0]
    by_name = {c.instance_id: c for c in encoders}
    holders = [by_name[name] for name in known.resident(mm_hash) if name in by_name]
    for name in known.in_flight(mm_hash):
        if name in by_name and by_name[name] not in holders:
            return by_name[name]
    mean = sum(c.assigned for c in encoders) / len(encoders)
    near = [c for c in holders if c.assigned <= RESIDENT_BALANCE * (mean + 1)]
    if near:
        return min(near, key=lambda c: (c is not prefill, busyness(c)))
    if any(c.load.num_gateways > 1 for c in encoders):
        return max(encoders, key=lambda c: weight(mm_hash, c.instance_id))
    return rule.encoder(image, encoders, prefill)


def weight(mm_hash: str, instance_id: str) -> bytes:
    """Of rendezvous hashing: who has most takes the image, so equal images meet."""
    return hashlib.blake2b(f"{mm_hash}/{instance_id}".encode(), digest_size=8).digest()


# --- for comparison, or with a storage that all encoders share ------------------------------------


class RoundRobin:
    """Each its turn, over all images of a gateway."""

    def __init__(self) -> None:
        self._images = itertools.count()

    def __call__(self, encoders: Sequence[Candidate]) -> Candidate:
        return encoders[next(self._images) % len(encoders)]


class ByChance:
    """Uniformly; `integer` draws, by number of the image."""

    def __init__(self, integer: Callable[..., int]) -> None:
        self._integer = integer
        self._images = itertools.count()

    def __call__(self, encoders: Sequence[Candidate]) -> Candidate:
        return encoders[self._integer("encode policy", next(self._images)) % len(encoders)]


def pick_encoder(policy: str, integer: Callable[..., int]) -> PickEncoder | None:
    """By the setting `encode_policy`; None: as placement does without one."""
    if policy == "round_robin":
        return RoundRobin()
    return ByChance(integer) if policy == "random" else None
