"""Continuous batching: who enters, who gives way, and which tokens are in the next step.

Theory of operation
-------------------
Policy only: no I/O, no clock, no tensors.  The step loop asks in this order, between two steps:

1. `victim`: running sequences need one more block for their next token and the pool has none.
   The youngest gives its own up and is computed again later (preemption by recompute).
2. `growth`: those who need a block get it.
3. `admissions`: the queue enters, as far as blocks reach.
4. `plan`: one budget of tokens, shared by decodes (first, so that running streams keep their pace)
   and chunks of prompts, in order of rank.

**Rank** is arrival minus a bonus, in seconds: lower is served first.  Waiting is worth exactly what
a bonus is worth, so the order of two requests never changes, and a request with a bonus of b can
only overtake what came at most b seconds before it: nobody starves.

**What admission promises.**  A prompt gets all its blocks when it enters, so a prompt that runs
never waits for memory; only decoding grows.  A sequence that cannot be computed again here (its
images' rows are gone once its prompt is computed) gets all blocks that it can ever need.  Then
the oldest sequence always goes on: everybody who holds blocks either is younger and gives way, or
ends by itself.  Nobody lives on promises, and the pool cannot livelock (fault F24).

A prompt whose next image is not here (`num_ready`) is passed over and keeps its place and blocks.
So is one with few tokens before that image, where a step costs as much for few tokens as for
many (`min_partial_tokens`): a GPU that launches kernels longer than it computes.

A step may be planned while one is under way.  So tokens count as computed when the step that does
it is launched, and as known when it is certain that they will be: a token that is being sampled
needs its block as any other.

Source: the unified scheduler of vLLM; chunked prefill of Sarathi-Serve.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.step_cost import StepCost

WATERMARK_SHARE = 0.01  # of the pool: left to those who run, or a newcomer would be thrown out
PROMPT_SHARE = 0.125  # of the budget, and of several places: prompts have it, however many decode


@dataclass(slots=True, eq=False)
class Entry:
    """One request as the scheduler sees it; tokens are of the prompt and of what was generated."""

    key: str
    num_tokens: int  # known or on their way; the last of them is the last to be computed
    rank: float = 0.0
    max_tokens: int = 0  # reserved at admission, if more than `num_tokens`
    num_computed: int = 0  # or being computed, in steps that are under way
    num_ready: int | None = None  # tokens that may be computed, if an image or token lacks
    num_blocks: int = 0  # leased
    recomputable: bool = True  # may be preempted while it decodes
    reserves_only: bool = False  # wants blocks and no place in the batch: KV that will be received
    decoding: bool = False
    keys: Sequence[Key] = ()  # of the full blocks of `num_tokens`
    num_published: int = 0  # blocks that others can find
    drafts: Sequence[int] = ()  # tokens that may follow: computed where there is room

    @property
    def num_left(self) -> int:
        """Tokens that could be computed now."""
        ready = self.num_tokens if self.num_ready is None else min(self.num_ready, self.num_tokens)
        return ready - self.num_computed

    def launched(self, count: int, *, ahead: bool) -> None:
        """A step with its next `count` tokens is under way; `ahead`: the next step may take the
        token that this one samples, before it is known here."""
        self.num_computed += count
        self.num_tokens += ahead


class Admission(NamedTuple):
    """An entry enters with these blocks; the first `num_cached` tokens are computed already."""

    entry: Entry
    blocks: tuple[int, ...]
    num_cached: int


@dataclass(slots=True)
class _Queue:
    """Entries by rank, equal ranks in order of arrival."""

    order: list[tuple[float, int, str]] = field(default_factory=list)
    places: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    serial: Iterator[int] = field(default_factory=itertools.count)

    def join(self, entry: Entry) -> None:
        place = (entry.rank, next(self.serial), entry.key)
        insort(self.order, place)
        self.places[entry.key] = place
        self.entries[entry.key] = entry

    def leave(self, key: str) -> bool:
        """False if it did not stand here."""
        place = self.places.pop(key, None)
        if place is None:
            return False
        del self.order[bisect_left(self.order, place)]
        del self.entries[key]
        return True

    def head(self) -> Entry | None:
        return self.entries[self.order[0][2]] if self.order else None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a step; `max_running` is of its sequences, and of prompts that enter while so many
    run: KV that arrives has its blocks and enters all the same.

    `min_partial_tokens`: what is ready of a prompt that lacks an image is computed only if it is
    as much as that.
    """

    max_step_tokens: int
    max_chunk_tokens: int
    max_running: int
    min_partial_tokens: int = 0


class BatchScheduler:
    """Admission by rank and blocks, preemption of the youngest, one token budget per step."""

    def __init__(
        self, pool: BlockPool, block_size: int, bounds: Bounds, cost: StepCost | None = None
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._bounds = bounds
        self._cost = cost
        self._queue = _Queue()  # prompts
        self._reservations = _Queue()  # blocks for KV that will be received
        self._prefilling: dict[str, Entry] = {}
        self._decoding: dict[str, Entry] = {}
        self._first_decode = 0
        self._watermark = int(pool.size * WATERMARK_SHARE)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.order) + len(self._reservations.order)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_spare_places(self) -> bool:
        """Whether steps have room for drafts, beside all who run."""
        return self.num_running < self._bounds.max_running

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    @property
    def decoding(self) -> Iterable[Entry]:
        return self._decoding.values()

    # --- who is here ------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Join the line, to be computed (for the first time or again) or to receive KV."""
        (self._reservations if entry.reserves_only else self._queue).join(entry)

    def add_decoding(self, entry: Entry) -> None:
        """Join the batch directly: its KV is there and its blocks are leased."""
        self._prefilling.pop(entry.key, None)
        entry.decoding = True
        self._decoding[entry.key] = entry

    def get(self, key: str) -> Entry | None:
        """The entry in the batch or in the queue."""
        running = self._decoding.get(key) or self._prefilling.get(key)
        return running or self._queue.entries.get(key)

    def waits(self, key: str) -> bool:
        """Whether it stands in the queue of prompts, to be computed for the first time or again."""
        return key in self._queue.entries

    def remove(self, key: str) -> bool:
        """Whether it stood in a queue: who is behind it may enter now."""
        for running in (self._prefilling, self._decoding):
            running.pop(key, None)
        waited = self._queue.leave(key)
        return self._reservations.leave(key) or waited

    # --- memory -----------------------------------------------------------------------------------

    def _room(self, entry: Entry) -> int:
        """Tokens behind its last known one that its blocks have room for."""
        return entry.num_blocks * self._block_size - entry.num_tokens

    def _lacking(self) -> list[Entry]:
        """Who decodes and has no place for its next token."""
        size = self._block_size
        return [e for e in self._decoding.values() if e.num_blocks * size < e.num_tokens]

    def victim(self) -> Entry | None:
        """Who must give its blocks up now, for decodes to take their next token; None: nobody.

        The youngest that can be computed again, which may be the one that lacks a block itself.
        """
        lacking = self._lacking()
        if len(lacking) <= self._pool.num_free:
            return None
        running = [*self._prefilling.values(), *self._decoding.values()]
        young = [entry for entry in running if entry.recomputable or not entry.decoding]
        return max(young, key=lambda entry: entry.rank, default=None)

    def growth(self) -> Iterator[tuple[Entry, tuple[int, ...]]]:
        """Blocks for the next token of those who decode, the oldest first; then, while blocks are
        not scarce, for drafts that do not fit.  Either is a block that they need soon anyway."""
        for entry in sorted(self._lacking(), key=attrgetter("rank")):
            blocks = self._pool.take(1)
            if blocks is None:
                return
            entry.num_blocks += 1
            yield entry, blocks
        for entry in self._decoding.values():
            if len(entry.drafts) <= self._room(entry):
                continue
            if self._pool.num_free <= self._watermark:
                return
            blocks = self._pool.take(1)
            assert blocks is not None  # one is free at least
            entry.num_blocks += 1
            yield entry, blocks

    def admissions(self) -> Iterator[Admission]:
        """Who enters now, strictly by rank: the first that lacks blocks stops those behind it."""
        while (entry := self._next()) is not None:
            tokens = max(entry.num_tokens, entry.max_tokens)
            count = self.blocks_for(tokens)
            spare = len(self._lacking())  # of those who run, for their next token
            if self.num_running and not entry.reserves_only:
                spare += self._watermark
            usable = (entry.num_tokens - 1) // self._block_size  # the last token gives the logits
            taken = self._pool.take_prefix(entry.keys[:usable], count, spare)
            if taken is None:
                return
            self._queue.leave(entry.key)
            self._reservations.leave(entry.key)
            blocks, num_found = taken
            entry.num_blocks = count
            entry.num_computed = num_found * self._block_size
            if not entry.reserves_only:
                self._prefilling[entry.key] = entry
            yield Admission(entry, blocks, entry.num_computed)

    def _next(self) -> Entry | None:
        reserving, prompt = self._reservations.head(), self._queue.head()
        if prompt is None or not self._has_place():
            return reserving
        if reserving is None or prompt.rank < reserving.rank:
            return prompt
        return reserving

    def _has_place(self) -> bool:
        """In the batch; who waits for an image takes none."""
        max_running = self._bounds.max_running
        if self.num_running < max_running:
            return True
        parked = sum(self._num_due(entry) <= 0 for entry in self._prefilling.values())
        return self.num_running - parked < max_running

    # --- the step ---------------------------------------------------------------------------------

    def plan(self) -> list[tuple[Entry, int]]:
        """The next step: `(entry, number of tokens)`, decodes first, then prompts by rank.

        With more decodes than the step holds, the window rotates, so that none starves.  A decode
        with more than one token is followed by so many of its drafts less one.
        """
        bounds = self._bounds
        prompts = [entry for entry in self._prefilling.values() if self._num_due(entry) > 0]
        kept = places = 0
        if prompts:
            prompts.sort(key=attrgetter("rank"))
            kept = int(bounds.max_step_tokens * PROMPT_SHARE)
            kept = min(kept, sum(entry.num_left for entry in prompts))
            places = min(len(prompts), math.ceil((bounds.max_running - 1) * PROMPT_SHARE))
        decodes = self._decodes(min(bounds.max_step_tokens - kept, bounds.max_running - places))
        step = self._with_drafts(decodes, bounds.max_step_tokens - kept - len(decodes))
        budget = bounds.max_step_tokens - sum(count for _, count in step)
        if self._cost is not None and decodes:
            budget = min(budget, self._cost.max_prompt_tokens(len(step)))
        for entry in prompts[: bounds.max_running - len(step)]:
            chunk = min(entry.num_left, bounds.max_chunk_tokens, budget)
            if chunk <= 0:
                break
            step.append((entry, chunk))
            budget -= chunk
        return step

    def _num_due(self, entry: Entry) -> int:
        """Tokens that are worth a step now."""
        is_partial = entry.num_ready is not None and entry.num_ready < entry.num_tokens
        enough = not is_partial or entry.num_left >= self._bounds.min_partial_tokens
        return entry.num_left if enough else 0

    def _with_drafts(self, decodes: list[Entry], budget: int) -> list[tuple[Entry, int]]:
        """Drafts take what is left of the decodes' share of the budget, and of the places in the
        batch: a step samples in no more places than it could without them, and where many decode
        and a step is dear anyway, nobody drafts."""
        spare = min(budget, self._bounds.max_running - self.num_running)
        step = []
        for entry in decodes:
            count = max(0, min(len(entry.drafts), spare, self._room(entry)))
            spare -= count
            step.append((entry, 1 + count))
        return step

    def _decodes(self, budget: int) -> list[Entry]:
        size = self._block_size
        decodes = [
            e
            for e in self._decoding.values()
            if e.num_left > 0 and e.num_blocks * size >= e.num_tokens
        ]
        if len(decodes) > budget:
            start = self._first_decode % len(decodes)
            self._first_decode = start + budget
            decodes = (decodes + decodes)[start : start + budget]
        return decodes
