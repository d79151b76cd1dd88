"""What waits at each instance, by the gateway's own books, in units that its costs are known for.

Theory of operation
-------------------
An instance has one gateway, so what waits there is what it was sent and has not said to be done.
The gateway hears that soon: of an image when the encoder tells that it holds the rows (cache
events, at most 20 ms late), of a prompt by its first token, of an answer by its end.  Heartbeats
come ten times later than that, and what was sent since the last one would have to be guessed; so
they carry what a unit costs (`StageCosts`), which changes slowly, and no amounts.

A prompt counts where it will be computed from the moment at which it is placed, also while its
images are being encoded elsewhere: an encoder that has prompts before it is no idle one.  An image
counts once, for the attempt that sent it first.

What is booked and never said to be done ends with its attempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
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
class _Attempt:
    prefill: str
    decode: str
    num_tokens: int
    images: dict[tuple[str, str], int] = field(default_factory=dict)  # encoder, hash: patches
    is_ready: bool = False  # its images are encoded
    has_begun: bool = False  # its first token is there


class Books:
    """Of the open attempts of one gateway."""

    def __init__(self) -> None:
        self._at: defaultdict[str, Backlog] = defaultdict(Backlog)
        self._attempts: dict[str, _Attempt] = {}
        self._owner: dict[tuple[str, str], str] = {}  # of an image at an encoder

    def __len__(self) -> int:
        return len(self._attempts)

    def at(self, instance_id: str) -> Backlog:
        return self._at.get(instance_id, NOTHING_WAITS)

    def sent(
        self,
        key: str,
        images: Iterable[tuple[str, str, int]],
        prefill: str,
        num_tokens: int,
        decode: str,
    ) -> None:
        """An attempt: encoder, hash and patches of each image that has to be encoded, who computes
        so many tokens of its prompt, and who decodes; either may be nobody (empty)."""
        attempt = self._attempts[key] = _Attempt(prefill, decode, num_tokens)
        for encoder, mm_hash, num_patches in images:
            if (encoder, mm_hash) not in self._owner:
                self._owner[encoder, mm_hash] = key
                attempt.images[encoder, mm_hash] = num_patches
                self._at[encoder].num_patches += num_patches
        self._at[prefill].num_tokens += num_tokens
        self._at[prefill].num_prompts += 1
        self._at[decode].num_sequences += 1
        self._go_on(attempt)

    def also(self, key: str, encoder: str, mm_hash: str, num_patches: int) -> None:
        """An image of an open attempt has to be encoded by this one, too."""
        if (encoder, mm_hash) not in self._owner:
            self._owner[encoder, mm_hash] = key
            self._attempts[key].images[encoder, mm_hash] = num_patches
            self._at[encoder].num_patches += num_patches
            self._go_on(self._attempts[key])

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
        self.prefilled(key)
        if (attempt := self._attempts.pop(key, None)) is not None:
            at = self._at[attempt.decode]
            at.num_sequences -= 1
            at.num_decoding -= 1
            self._forget_idle(attempt.prefill, attempt.decode)

    def _go_on(self, attempt: _Attempt) -> None:
        """When its images are encoded, its prompt is ready."""
        if not (attempt.images or attempt.is_ready):
            attempt.is_ready = True
            self._at[attempt.prefill].num_ready += attempt.num_tokens

    def _forget_idle(self, *names: str) -> None:
        for name in names:
            if self._at.get(name) == NOTHING_WAITS:
                del self._at[name]
