"""A request as the scheduler sees it, of numbers alone; and those of a crowd, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from epd.layouts import PASSED, RowBlocks, Windowed
from epd.scheduling.batching import BatchScheduler


@dataclass(slots=True, eq=False)
class Entry:
    key: str
    num_tokens: int  # known or on their way
    rank: float = 0.0
    num_promised: int = 0
    num_computed: int = 0  # or being computed
    num_ready: int | None = None  # tokens that may be computed, if an image lacks
    block_table: tuple[int, ...] = ()
    recomputable: bool = True
    drafts: Sequence[int] = ()
    num_passed: int = 0
    blocks_ahead: tuple[int, ...] = ()
    num_settled: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(b for b in (*self.block_table, *self.blocks_ahead) if b != PASSED)

    def slide(self, passed: Mapping[int, int]) -> None:
        gone = passed.keys()
        self.block_table = tuple(
            PASSED if place in gone else block for place, block in enumerate(self.block_table)
        )
        self.num_passed += len(gone)

    def grow(self, blocks: tuple[int, ...]) -> None:
        self.block_table += blocks
        self.blocks_ahead = tuple(b for b in self.blocks_ahead if b not in blocks)

    @property
    def num_launched(self) -> int:
        return self.num_computed

    @property
    def num_expected(self) -> int:
        return self.num_tokens

    @property
    def num_left(self) -> int:
        ready = self.num_tokens if self.num_ready is None else min(self.num_ready, self.num_tokens)
        return ready - self.num_computed

    @property
    def lacks_rows(self) -> bool:
        return self.num_ready is not None and self.num_ready < self.num_tokens

    def launched(self, count: int, *, ahead: bool) -> None:
        self.num_computed += count
        self.num_tokens += ahead


def drafts_of(entry: Entry) -> Sequence[int]:
    return entry.drafts


def admit(scheduler: BatchScheduler[Entry]) -> list[str]:
    """Who enters, with what it is given."""
    entered = []
    for entry, blocks, num_cached, *_ in scheduler.admissions():
        entry.block_table, entry.num_computed = blocks, num_cached
        entered.append(entry.key)
    return entered


def grow(scheduler: BatchScheduler[Entry]) -> list[tuple[Entry, tuple[int, ...]]]:
    """Who gets more blocks, and which."""
    grown = []
    for entry, blocks in scheduler.growth():
        entry.grow(blocks)
        grown.append((entry, blocks))
    return grown


# --- of a crowd -----------------------------------------------------------------------------------

BLOCK = 4
PLAIN = RowBlocks(BLOCK)


def windows_of(window: int) -> RowBlocks:
    """One kind sees everything; another, of blocks half as large, so many tokens."""
    size = 2 * BLOCK
    windowed = Windowed(1, BLOCK, window), Windowed(2, size, window)
    return RowBlocks(size, (0, 0, BLOCK), windowed)


@dataclass(frozen=True)
class Shape:
    """One request; times are steps."""

    arrives: int
    prompt: int
    output: int
    stops_at: int = 0  # an end token comes sooner
    bonus: int = 0
    image_at: int = 0  # 0: none; else the place of its row, ready `ready_after` steps later
    ready_after: int = 0
    received: bool = False  # its KV comes from elsewhere, `ready_after` steps after admission
    leaves_after: int = 0  # 0: stays; else the client hangs up so many steps after arrival
    family: int = 0  # requests of one family share their tokens
    drafts: int = 0  # while it decodes, so many in every step; every third is wrong


@dataclass
class Job:
    shape: Shape
    entry: Entry
    tokens: list[int]
    output: int = 0
    reserves: bool = False
    arrives_kv: int = -1
    num_preempted: int = 0
    comes: Collection[int] = ()  # places of its table that are received
    unproven: list[tuple[int, bytes]] = field(default_factory=list)
    done: bool = False
    ends: int = -1
    in_flight: int = 0  # steps under way


@dataclass
class Part:
    """A job in a step: its tokens `[start, stop)`, and drafts behind them."""

    job: Job
    start: int
    stop: int
    drafts: Sequence[int]


def draw(rng: random.Random, count: int, num_blocks: int, rows: RowBlocks = PLAIN) -> list[Shape]:
    """Random shapes, each of which fits the pool alone."""
    shapes = []
    for _ in range(count):
        output = rng.randint(1, 12) if rng.random() < 0.7 else rng.randint(12, 30)
        prompt = rng.randint(1, max(1, min(40, rows.room(num_blocks) - output - 1)))
        kind = rng.random()
        shapes.append(
            Shape(
                rng.randint(0, count // 2),
                prompt,
                output,
                stops_at=rng.choice((0, 0, rng.randint(1, output))),
                bonus=rng.choice((0, 0, 0, 5, 20)),
                image_at=rng.randint(1, prompt - 1) if kind < 0.4 and prompt > 1 else 0,
                ready_after=rng.randint(0, 12),
                received=kind > 0.8 or kind < 0.1,
                leaves_after=rng.randint(1, 30) if rng.random() < 0.15 else 0,
                family=rng.randint(0, 3),
                drafts=rng.choice((0, 0, 1, 5)),
            )
        )
    return shapes
