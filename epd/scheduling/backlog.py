"""What waits at each instance, by the gateway's own books, in the units of its costs.

Theory of operation
-------------------
An instance has one gateway, so what waits there is what it was sent and has not reported as done.
These reports come soon: of an image with the encoder's cache events, at most 20 ms late; of a
prompt with its first token; of an answer with its end.  Heartbeats are ten times as late and miss
all work sent since the last one.  So they carry the costs of a unit (`StageCosts`), which change
slowly, and no amounts.

A prompt counts at its instance from its placement on, also while its images are encoded elsewhere:
an encoder with prompts before it is not idle.  An image counts once, for the attempt that sent it
first.

What is never reported as done ends with its attempt.  So one record of an attempt has all that is
counted of it: the instances that it uses, the encoders that have its images, and the work.  That
needs no events: it bridges the time until the first one (`residency.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backlog:
    """Of one instance."""

    num_patches: int = 0  # of images to encode
    num_tokens: int = 0  # of prompts to compute,
    num_ready: int = 0  # and so many of them have their images
    num_sequences: int = 0  # that decode there, or will,
    num_decoding: int = 0  # and that do: their first tokens are there
    num_prompts: int = 0  # attempts whose prompt it will compute, wherever their images are,
    num_served: int = 0  # and those whose prompt it has computed since there was none


NOTHING_WAITS = Backlog()  # never written


@dataclass(slots=True)
class Attempt:
    """What was sent, and what is left of it."""

    prefill: str  # instances; empty: none computes the prompt,
    decode: str  # or none decodes
    num_tokens: int  # of its prompt, to compute
    images: dict[tuple[str, str], int]  # encoder, hash: patches, where it has to be encoded
    sent: tuple[tuple[str, str], ...] = ()  # encoder and hash of each image
    instances: tuple[str, ...] = ()  # all that it uses
    is_ready: bool = field(default=False, init=False)  # its images are encoded
    has_begun: bool = field(default=False, init=False)  # its first token is there


class Books:
    """Of the open attempts of one gateway, one for each generation."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}
        self._at: defaultdict[str, Backlog] = defaultdict(Backlog)
        self._assigned: Counter[str] = Counter()
        self._owner: dict[tuple[str, str], str] = {}  # of an image at an encoder
        self._flying: dict[str, dict[str, str]] = {}  # by hash: attempt, encoder

    def __len__(self) -> int:
        return len(self._attempts)

    def at(self, instance_id: str) -> Backlog:
        return self._at.get(instance_id, NOTHING_WAITS)

    @property
    def num_assigned(self) -> int:
        return self._assigned.total()

    def assigned_to(self, instance_id: str) -> int:
        """Open attempts that use this instance."""
        return self._assigned[instance_id]

    def in_flight(self, mm_hash: str) -> tuple[str, ...]:
        """Encoders that an open attempt has sent it to, the first one first."""
        return tuple(dict.fromkeys(self._flying.get(mm_hash, {}).values()))

    def sent(self, key: str, attempt: Attempt) -> None:
        """The present attempt of a generation, instead of the one before."""
        self.ended(key)
        self._attempts[key] = attempt
        self._assigned.update(attempt.instances)
        for encoder, mm_hash in attempt.sent:
            self._flying.setdefault(mm_hash, {})[key] = encoder
        images, attempt.images = attempt.images, {}
        for (encoder, mm_hash), num_patches in images.items():
            self._book(key, attempt, encoder, mm_hash, num_patches)
        self._at[attempt.prefill].num_tokens += attempt.num_tokens
        self._at[attempt.prefill].num_prompts += 1
        self._at[attempt.decode].num_sequences += 1
        self._go_on(attempt)

    def also(self, key: str, encoder: str, mm_hash: str, num_patches: int) -> None:
        """An image of an open attempt has to be encoded by this one, too."""
        attempt = self._attempts[key]
        self._book(key, attempt, encoder, mm_hash, num_patches)
        self._go_on(attempt)

    def _book(
        self, key: str, attempt: Attempt, encoder: str, mm_hash: str, num_patches: int
    ) -> None:
        if (encoder, mm_hash) not in self._owner:
            self._owner[encoder, mm_hash] = key
            attempt.images[encoder, mm_hash] = num_patches
            self._at[encoder].num_patches += num_patches

    def encoded(self, encoder: str, mm_hash: str) -> None:
        """An encoder holds the rows."""
        if (key := self._owner.pop((encoder, mm_hash), None)) is not None:
            attempt = self._attempts[key]
            self._at[encoder].num_patches -= attempt.images.pop((encoder, mm_hash))
            self._go_on(attempt)
            self._forget_idle(encoder)

    def prefilled(self, key: str) -> None:
        """Its first token is there: of its prompt and its images nothing is left to do."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.has_begun:
            return
        for encoder, mm_hash in list(attempt.images):
            self.encoded(encoder, mm_hash)
        attempt.has_begun = True
        at = self._at[attempt.prefill]
        at.num_ready -= attempt.num_tokens
        at.num_tokens -= attempt.num_tokens
        at.num_prompts -= 1
        at.num_served = at.num_served + 1 if at.num_prompts else 0
        self._at[attempt.decode].num_decoding += 1

    def ended(self, key: str) -> None:
        """The attempt is over (idempotent)."""
        if (attempt := self._attempts.get(key)) is None:
            return
        self._assigned.subtract(attempt.instances)
        for _, mm_hash in attempt.sent:
            flying = self._flying.get(mm_hash, {})
            flying.pop(key, None)
            if not flying:
                self._flying.pop(mm_hash, None)
        self._end_work(key, attempt)

    def _end_work(self, key: str, attempt: Attempt) -> None:
        self.prefilled(key)
        del self._attempts[key]
        at = self._at[attempt.decode]
        at.num_sequences -= 1
        at.num_decoding -= 1
        self._forget_idle(attempt.prefill, attempt.decode)

    def _go_on(self, attempt: Attempt) -> None:
        """When its images are encoded, its prompt is ready."""
        if not (attempt.images or attempt.is_ready):
            attempt.is_ready = True
            self._at[attempt.prefill].num_ready += attempt.num_tokens

    def _forget_idle(self, *names: str) -> None:
        for name in names:
            if self._at.get(name) == NOTHING_WAITS:
                del self._at[name]
