"""Continuous batching: who enters, who gives way, and which tokens are in the next step.

Theory of operation
-------------------
Policy only: no I/O, no clock, no tensors, and no copy of a request.  Its data are read from the
request itself (`Schedulable`); only its queue, or that it runs, is kept here.  The step loop asks
in this order, between two steps:

1. `passing`: blocks behind a window go back (`windows.py`), before any is taken.
2. `victim`: running sequences need one more block for their next token and the pool has none.  The
   youngest gives its own up and is computed again later (preemption by recompute).
3. `growth`: those who need a block get it.
4. `admissions`: the queue enters, as far as blocks reach.
5. `plan`: one budget of tokens, shared by decodes (first, so that running streams keep their pace)
   and chunks of prompts, in order of rank.

**Rank** is arrival minus a bonus, in seconds: lower is served first.  So the order of two requests
never changes, and a bonus of b overtakes what came at most b seconds before: nobody starves.

**What admission promises.**  A prompt gets all its blocks when it enters (with a window, as many as
it sees).  So one that runs never waits for memory; only decoding grows.  A sequence that cannot be
computed again here (its images' rows are gone once its prompt is computed) gets all blocks that it
can ever need.  Then the oldest sequence always goes on: everybody who holds blocks either is
younger and gives way, or ends by itself.  Nobody lives on promises, and the pool cannot livelock
(fault F24).

A prompt whose next image is not here (`lacks_rows`) is passed over and keeps its place and
blocks.  So is one with few tokens before it, where few cost as much as many (`min_partial_tokens`).

Where a picture must not be cut, the first prompt of a step has a whole one, however many decode:
the share of prompts is as large as that.  No step is larger than its budget for it.

A step may be planned while one is under way.  So tokens count as computed when their step is
launched.  A token that is being sampled counts for the blocks, since it needs one as any other.

Source: the unified scheduler of vLLM; chunked prefill of Sarathi-Serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from epd.layouts import RowBlocks
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.prefix_keys import of_blocks
from epd.scheduling.snapshots import Snapshots, TakenBlocks
from epd.scheduling.step_cost import StepCost
from epd.scheduling.waiting import Queue, Schedulable
from epd.scheduling.windows import Windows

WATERMARK_SHARE = 0.01  # of the pool: left to those who run, or a newcomer would be thrown out
PROMPT_SHARE = 0.125  # of the budget, and of several places: prompts have it, however many decode
RECEIVED_BONUS_S = 10.0  # KV that will be received goes before prompts: it is being computed


T = TypeVar("T", bound=Schedulable)


class Admission(NamedTuple, Generic[T]):
    """A request gets these blocks; the first `num_cached` tokens are computed already.

    `reserves`: for KV that will be received; it has no place in the batch.  Of a family with
    states, `states_found` has the blocks of the state behind the cached tokens.  `states_kept` has
    those for states to be kept, by the number of tokens before them.  `ahead` are for later places
    of its table; `held` are places with a window and others whose KV will not be received.
    """

    entry: T
    blocks: tuple[int, ...]
    num_cached: int
    reserves: bool
    states_found: tuple[int, ...] = ()
    states_kept: Mapping[int, tuple[int, ...]] = {}
    ahead: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


class Share(NamedTuple, Generic[T]):
    """What a step computes of a request: so many of its next tokens."""

    entry: T
    num_tokens: int
    decodes: bool  # of its answer, not of its prompt


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Limits of a step; `max_running` is of its sequences, and of prompts that enter while so many
    run: KV that arrives has its blocks and enters all the same.

    `min_partial_tokens`: what is ready of a prompt that lacks an image is computed only if it is
    as much as that.  `max_uncut_tokens`: of a picture, which may be more than a chunk.  `depth`:
    steps under way at once.
    """

    max_step_tokens: int
    max_chunk_tokens: int
    max_running: int
    min_partial_tokens: int = 0
    max_uncut_tokens: int = 0
    depth: int = 1

    @property
    def reach(self) -> int:
        """Tokens of a prompt that steps under way compute, at most."""
        return self.depth * max(self.max_chunk_tokens, self.max_uncut_tokens)


class BatchScheduler(Generic[T]):
    """Admission by rank and blocks, preemption of the youngest, one token budget per step."""

    def __init__(
        self,
        pool: BlockPool,
        rows: RowBlocks,
        bounds: StepBounds,
        cost: StepCost | None = None,
        num_state_blocks: int = 0,
        drafts_of: Callable[[T], Sequence[int]] | None = None,
        uncut: Callable[[T, int], int] | None = None,
    ) -> None:
        """`num_state_blocks`: the first of every table, which hold no tokens.  `drafts_of`: tokens
        that may follow, computed where there is room.  `uncut`: tokens of a chunk of about so many
        that cuts no picture (`roles/steps/pictures.py`)."""
        self._drafts_of = drafts_of
        self._uncut = uncut
        self._pool = pool
        self._rows = rows
        self._num_state_blocks = num_state_blocks
        self._snapshots = Snapshots(pool, num_state_blocks)
        self._windows = Windows(pool, rows, bounds.reach, bounds.depth) if rows.windowed else None
        self._bounds = bounds
        self._cost = cost
        self._queue = Queue[T]()  # prompts
        self._reservations = Queue[T]()  # blocks for KV that will be received
        self._prefilling: dict[str, T] = {}
        self._decoding: dict[str, T] = {}
        self._first_decode = 0
        self.at_hand: T | None = None  # whom it looks at, should that raise
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
        """Of the table of a sequence with so many tokens."""
        return self._num_state_blocks + self._rows.count(num_tokens)

    @property
    def decoding(self) -> Iterable[T]:
        return self._decoding.values()

    # --- who is here ------------------------------------------------------------------------------

    def add(self, entry: T, keys: Sequence[Key] = ()) -> None:
        """Join the queue of prompts, to be computed, for the first time or again."""
        self._queue.join(entry.rank, entry, keys)

    def reserve(self, entry: T, keys: Sequence[Key] = ()) -> None:
        """Join the queue for blocks alone: KV that will be received, and a first token with it."""
        self._reservations.join(entry.rank - RECEIVED_BONUS_S, entry, keys)

    def add_decoding(self, entry: T) -> None:
        """Join the batch directly: its KV is there and its blocks are leased."""
        self._prefilling.pop(entry.key, None)
        self._decoding[entry.key] = entry

    def waits(self, key: str) -> bool:
        """Whether it stands in the queue of prompts, to be computed for the first time or again."""
        return key in self._queue.waiting

    def remove(self, key: str) -> bool:
        """Whether it stood in a queue: who is behind it may enter now."""
        for running in (self._prefilling, self._decoding):
            running.pop(key, None)
        waited = self._queue.leave(key)
        return self._reservations.leave(key) or waited

    def expel(self, key: str) -> bool:
        """Likewise of one that cannot be planned; False if it was not here."""
        runs = key in self._prefilling or key in self._decoding
        return self.remove(key) or runs

    # --- memory -----------------------------------------------------------------------------------

    def _room(self, entry: T) -> int:
        """Tokens behind its last expected one that its blocks have room for."""
        self.at_hand = entry
        num_blocks = len(entry.block_table) - self._num_state_blocks
        return self._rows.room(num_blocks) - entry.num_expected

    def _lacking(self) -> dict[T, int]:
        """Who decodes and has no place for its next token, and the blocks that give it one."""
        poor = [entry for entry in self._decoding.values() if self._room(entry) < 0]
        if (windows := self._windows) is not None:
            return {e: windows.lacking(e, e.num_expected) for e in poor}
        return {e: self.blocks_for(e.num_expected) - len(e.block_table) for e in poor}

    def passing(self) -> Iterator[tuple[T, dict[int, int]]]:
        """Who gives up blocks behind its window now, and which, by their place in its table."""
        if (windows := self._windows) is None:
            return
        for entries, decodes in ((self._decoding, True), (self._prefilling, False)):
            for entry in entries.values():
                self.at_hand = entry
                if passed := windows.passing(entry, decodes=decodes):
                    yield entry, passed

    def victim(self) -> T | None:
        """Who must give its blocks up now, for decodes to take their next token; None: nobody.

        The youngest that can be computed again, which may be the one that lacks a block itself.
        """
        num_free = self._pool.num_free
        most = len(self._decoding) * len(self._rows.starts)
        if most <= num_free or sum(self._lacking().values()) <= num_free:
            return None
        decodes = (entry for entry in self._decoding.values() if entry.recomputable)
        young = [*self._prefilling.values(), *decodes]
        return max(young, key=lambda entry: entry.rank, default=None)

    def growth(self) -> Iterator[tuple[T, tuple[int, ...]]]:
        """Blocks for the next token of those who decode, the oldest first; then, while blocks are
        not scarce, for drafts that do not fit.  Either is a block that they need soon anyway.
        They have them before the next one is asked for, as with `admissions`."""
        for entry, count in sorted(self._lacking().items(), key=lambda item: item[0].rank):
            if count > self._pool.num_free:
                return
            yield entry, self._more(entry, entry.num_expected)
        if (windows := self._windows) is not None:
            for entry in self._prefilling.values():
                if blocks := windows.extend(entry, windows.wanted(entry, decodes=False)):
                    yield entry, blocks
        if self._drafts_of is None:
            return
        for entry in self._decoding.values():
            drafts = self._drafts_of(entry)
            if not drafts or len(drafts) <= self._room(entry):
                continue
            if self._pool.num_free <= self._watermark:
                return
            yield entry, self._more(entry, entry.num_expected + self._room(entry) + 1)

    def _more(self, entry: T, num_tokens: int) -> tuple[int, ...]:
        """Blocks for so many tokens, of which the pool has at least one."""
        if self._windows is not None:
            return self._windows.extend(entry, num_tokens)
        return self._pool.take(self.blocks_for(num_tokens) - len(entry.block_table)) or ()

    def admissions(self) -> Iterator[Admission[T]]:
        """Who enters now, strictly by rank: the first that lacks blocks stops those behind it."""
        while (line := self._next()) is not None:
            head = line.head()
            assert head is not None  # or it would not be its turn
            entry, reserves = head.entry, line is self._reservations
            self.at_hand = entry
            count = self.blocks_for(max(entry.num_tokens + reserves, entry.num_promised))
            spare = sum(self._lacking().values())  # of those who run, for their next token
            if (windows := self._windows) is not None:
                spare += sum(windows.lacking_chunk(other) for other in self._prefilling.values())
            if self.num_running and not reserves:
                spare += self._watermark
            size = self._rows.num_tokens
            keys = head.keys[: (entry.num_tokens - 1) // size]  # the last token gives the logits
            if windows is not None:
                take = windows.receive if reserves else windows.take
                taken = take(keys, entry.num_tokens, entry.num_promised, spare)
            else:
                taken = self._take(keys, count, spare, with_state=not reserves)
            if taken is None:
                return
            line.leave(entry.key)
            first = count - self._num_state_blocks
            blocks = taken.blocks[first:] + taken.blocks[:first]
            if not reserves:
                self._prefilling[entry.key] = entry
            kept = {place * size: states for place, states in taken.kept.items()}
            num_cached = self._rows.room(taken.num_found)
            yield Admission(
                entry, blocks, num_cached, reserves, taken.found, kept, taken.ahead, taken.held
            )

    def _take(
        self, keys: Sequence[Key], count: int, spare: int, *, with_state: bool
    ) -> TakenBlocks | None:
        """A state that will be received need not be found."""
        if with_state and self._num_state_blocks:
            return self._snapshots.take(keys, count, spare)
        each = of_blocks(keys, self._rows)
        taken = self._pool.take_prefix(each, count, spare, len(self._rows.starts))
        return TakenBlocks(*taken) if taken is not None else None

    def _next(self) -> Queue[T] | None:
        """The queue whose head is next."""
        reserving, prompt = self._reservations.head(), self._queue.head()
        if prompt is None or not self._has_place():
            return self._reservations if reserving is not None else None
        if reserving is None or prompt.place[0] < reserving.place[0]:
            return self._queue
        return self._reservations

    def _has_place(self) -> bool:
        """In the batch; who waits for an image takes none."""
        max_running = self._bounds.max_running
        if self.num_running < max_running:
            return True
        parked = sum(self._num_due(entry) <= 0 for entry in self._prefilling.values())
        return self.num_running - parked < max_running

    # --- the step ---------------------------------------------------------------------------------

    def plan(self, passed_over: Collection[str] = ()) -> list[Share[T]]:
        """The next step: decodes first, then prompts by rank; none of `passed_over`.

        With more decodes than the step holds, the window rotates, so that none starves.  A decode
        with more than one token is followed by so many of its drafts less one.
        """
        bounds = self._bounds
        due = (entry for entry in self._prefilling.values() if self._num_due(entry) > 0)
        prompts = [entry for entry in due if entry.key not in passed_over]
        kept = places = 0
        if prompts:
            prompts.sort(key=attrgetter("rank"))
            kept = int(bounds.max_step_tokens * PROMPT_SHARE)
            kept = min(kept, sum(entry.num_left for entry in prompts))
            if self._uncut is not None:
                self.at_hand = prompts[0]
                kept = max(kept, self._uncut(prompts[0], kept))
            places = min(len(prompts), math.ceil((bounds.max_running - 1) * PROMPT_SHARE))
        most = min(bounds.max_step_tokens - kept, bounds.max_running - places)
        decodes = self._decodes(most, passed_over)
        step = self._with_drafts(decodes, bounds.max_step_tokens - kept - len(decodes))
        budget = bounds.max_step_tokens - sum(share.num_tokens for share in step)
        if self._cost is not None and decodes:
            bound = self._cost.max_prompt_tokens(len(step))
            budget = budget if bound is None else min(budget, bound)
        for place, entry in enumerate(prompts[: bounds.max_running - len(step)]):
            self.at_hand = entry
            chunk = min(self._num_left(entry), bounds.max_chunk_tokens, budget)
            if chunk <= 0:
                break
            if self._uncut is not None:
                chunk = self._uncut(entry, chunk)
                if (place and chunk > budget) or chunk > self._num_left(entry):
                    continue
            step.append(Share(entry, chunk, decodes=False))
            budget -= chunk
        return step

    def _num_due(self, entry: T) -> int:
        """Tokens that are worth a step now."""
        self.at_hand = entry
        num_left = self._num_left(entry)
        enough = num_left >= self._bounds.min_partial_tokens or not entry.lacks_rows
        return num_left if enough else 0

    def _num_left(self, entry: T) -> int:
        """Of those, as many as its table has room for."""
        if self._windows is None:
            return entry.num_left
        return min(entry.num_left, self._rows.room(len(entry.block_table)) - entry.num_launched)

    def _with_drafts(self, decodes: list[T], budget: int) -> list[Share[T]]:
        """Drafts take what is left of the decodes' budget and of the places in the batch: a step
        samples in no more places than without them.  Where many sequences decode, and a step is
        dear anyway, there are none."""
        if self._drafts_of is None:
            return [Share(entry, 1, decodes=True) for entry in decodes]
        spare = min(budget, self._bounds.max_running - self.num_running)
        step = []
        for entry in decodes:
            count = 0
            if drafts := self._drafts_of(entry):
                count = max(0, min(len(drafts), spare, self._room(entry)))
                spare -= count
            step.append(Share(entry, 1 + count, decodes=True))
        return step

    def _decodes(self, budget: int, passed_over: Collection[str]) -> list[T]:
        decodes = [e for e in self._decoding.values() if self._room(e) >= 0 and e.num_left > 0]
        decodes = [e for e in decodes if e.key not in passed_over]
        if len(decodes) > budget:
            start = self._first_decode % len(decodes)
            self._first_decode = start + budget
            decodes = (decodes + decodes)[start : start + budget]
        return decodes
