"""A crowd of random requests through the pure scheduler, with every law checked at every step.

`Crowd` plays the step loop and the outside: arrivals, images that come late, KV that is received,
clients that leave.  Content is a number per token, so that two requests may share a prefix, and
every block remembers what was written into it: a wrong block is seen when it is read.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from epd.layouts import PASSED, RowBlocks
from epd.scheduling.batching import BatchScheduler, Share, StepBounds
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.kv_order import moved
from epd.scheduling.prefix_keys import of_blocks
from tests.scheduling.entry import PLAIN, Entry, Job, Part, Shape, drafts_of, draw, windows_of


@dataclass
class Crowd:
    shapes: list[Shape]
    num_blocks: int = 32
    bounds: StepBounds = field(default_factory=lambda: StepBounds(16, 8, 8))
    caching: bool = True
    ahead: bool = False  # a step is planned while one is under way
    rows: RowBlocks = PLAIN
    now: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scheduler = BatchScheduler[Entry](
            self.pool, self.rows, self.bounds, drafts_of=drafts_of
        )
        windowed = {one.column: one[1:] for one in self.rows.windowed}
        ends = [windowed.get(at, (self.rows.num_tokens, 0)) for at in range(len(self.rows.starts))]
        self.spans = [(start, *end) for start, end in zip(self.rows.starts, ends, strict=True)]
        self.memory: dict[int, dict[int, int]] = {}
        self.num_passed = 0
        self.under_way: list[list[Part]] = []
        self.jobs: dict[str, Job] = {}
        self.line = sorted(enumerate(self.shapes), key=lambda pair: (pair[1].arrives, pair[0]))

    # --- life of a job ----------------------------------------------------------------------------

    def arrive(self, number: int, shape: Shape) -> None:
        key = str(number)
        tokens = [shape.family * 1000 + i for i in range(shape.prompt)]
        entry = Entry(key, 0, self.now - shape.bonus)
        job = Job(shape, entry, tokens)
        self.jobs[key] = job
        self.enqueue(job, receives=shape.received)

    def enqueue(self, job: Job, *, receives: bool = False) -> None:
        shape = job.shape
        job.unproven = []
        images = bool(shape.image_at)
        self_contained = not images
        job.entry = Entry(
            job.entry.key,
            len(job.tokens),
            job.entry.rank,
            num_promised=0 if self_contained else shape.prompt + shape.output,
            num_ready=self.ready(job),
            recomputable=self_contained,
        )
        job.reserves = receives
        keys = self.keys(job) if self.caching else ()
        (self.scheduler.reserve if receives else self.scheduler.add)(job.entry, keys)

    def ready(self, job: Job) -> int | None:
        shape = job.shape
        waits = shape.image_at and self.now < shape.arrives + shape.ready_after
        covered = job.entry.num_computed > shape.image_at
        return shape.image_at if waits and not covered and not shape.received else None

    def keys(self, job: Job) -> list[bytes]:
        ends = range(0, len(job.tokens) + 1, self.rows.num_tokens)[1:]
        return [repr(job.tokens[:end]).encode() for end in ends]

    def leave(self, job: Job) -> None:
        """It has ended; its blocks stay until no step writes into them."""
        self.scheduler.remove(job.entry.key)
        job.done, job.ends = True, self.now
        self.let_go(job)

    def let_go(self, job: Job) -> None:
        if not job.in_flight:
            self.give_back(job)

    def give_back(self, job: Job) -> None:
        self.pool.give_back(job.entry.blocks)
        job.entry.block_table = job.entry.blocks_ahead = ()
        job.entry.num_passed = 0

    # --- one step ---------------------------------------------------------------------------------

    def step(self) -> None:
        while self.line and self.line[0][1].arrives <= self.now:
            self.arrive(*self.line.pop(0))
        for job in [j for j in self.jobs.values() if not j.done]:
            shape = job.shape
            if shape.leaves_after and self.now >= shape.arrives + shape.leaves_after:
                self.leave(job)
            job.entry.num_ready = self.ready(job)
            if job.arrives_kv == self.now and not job.done:
                self.receive(job)
        plan = self.plan()
        if plan:
            self.under_way.append([self.launch(*share) for share in plan])
        if self.under_way and (len(self.under_way) > self.ahead or not plan):
            for part in self.under_way.pop(0):
                self.settle(part)
        self.now += 1

    def draft(self, job: Job) -> None:
        """Fewer than it may still say; who runs ahead has nothing to draft from."""
        known = len(job.tokens)
        limit = 0 if self.ahead else min(job.shape.drafts, job.shape.output - job.output - 1)
        right = [job.shape.family * 1000 + known + i for i in range(limit)]
        job.entry.drafts = [-1 if (known + i) % 3 == 0 else t for i, t in enumerate(right)]

    def plan(self) -> list[Share[Entry]]:
        for entry in self.scheduler.decoding:
            self.draft(self.jobs[entry.key])
        for entry, passed in self.scheduler.passing():
            entry.slide(passed)
            self.note(self.jobs[entry.key], passed)
            self.pool.give_back(passed.values())
            self.num_passed += len(passed)
        if not self.preempt():
            return []
        for entry, blocks in self.scheduler.growth():
            entry.grow(blocks)
        self.admit()
        plan = self.scheduler.plan()
        self.check(plan)
        return plan

    def note(self, job: Job, passed: Mapping[int, int]) -> None:
        """They are found when it has a token, unless others have taken them."""
        each = of_blocks(self.keys(job), self.rows) if self.caching else ()
        noted = [(block, each[place]) for place, block in passed.items() if place < len(each)]
        for block, key in noted:
            self.pool.note(block, key)
        job.unproven += noted

    def preempt(self) -> bool:
        """False: who must give way is in a step."""
        while (victim := self.scheduler.victim()) is not None:
            job = self.jobs[victim.key]
            if job.in_flight:
                return False
            assert not job.shape.image_at or victim.key not in self.scheduler._decoding, (
                "its rows are gone"
            )
            decodes = self.scheduler._decoding
            running = [*self.scheduler._prefilling.values(), *decodes.values()]
            older = [e for e in running if e.rank > victim.rank]
            spared = (e.key in decodes and not e.recomputable for e in older)
            assert all(spared), "an older one gave way"
            self.scheduler.remove(victim.key)
            self.give_back(job)
            job.num_preempted += 1
            self.num_preempted += 1
            self.enqueue(job)
        return True

    def admit(self) -> None:
        for admission in self.scheduler.admissions():
            job = self.jobs[admission.entry.key]
            for other in self.jobs.values():  # same kind of line, lower rank: it was overtaken
                if not other.done and not other.entry.block_table and other is not job:
                    same = other.reserves == admission.reserves
                    assert not same or other.entry.rank >= admission.entry.rank, "overtaken"
            assert not job.entry.block_table
            job.entry.block_table = admission.blocks
            job.entry.blocks_ahead = admission.ahead
            job.entry.num_passed = admission.blocks.count(PASSED)
            job.entry.num_settled = admission.num_cached
            self.num_cached += admission.num_cached
            if admission.reserves:
                held = admission.held or range(self.rows.count(admission.num_cached))
                job.comes = {*moved(self.rows, len(job.tokens))} - {*held}
                assert job.comes, "its last block comes in any case"
                job.arrives_kv = self.now + 1 + job.shape.ready_after
            else:
                assert admission.num_cached < len(job.tokens), "somebody must compute the logits"
                job.entry.num_computed = admission.num_cached
                job.entry.num_ready = self.ready(job)
                self.read(job, admission.num_cached)

    def receive(self, job: Job) -> None:
        """What decoding sees of its KV and lacked has landed: it decodes at once."""
        self.write(job, 0, job.tokens, job.comes)
        entry = job.entry
        entry.num_computed = entry.num_settled = len(job.tokens)
        self.sample(job)
        if not job.done:
            entry.num_tokens = len(job.tokens)
            self.scheduler.add_decoding(entry)

    def launch(self, entry: Entry, count: int, decodes: bool) -> Part:
        job = self.jobs[entry.key]
        drafts = entry.drafts[: count - 1] if decodes else []
        start, stop = entry.num_computed, entry.num_computed + count - len(drafts)
        part = Part(job, start, stop, drafts)
        self.read(job, start)
        self.write(job, start, [*(self.token(job, i) for i in range(start, stop)), *drafts])
        goes_on = job.output + 1 < job.shape.output  # its limit is known before
        ahead = self.ahead and goes_on and stop >= len(job.tokens)  # it samples
        entry.launched(count, ahead=ahead)
        if ahead and not decodes:
            self.scheduler.add_decoding(entry)
        job.in_flight += 1
        self.num_computed += count
        return part

    def settle(self, part: Part) -> None:
        job = part.job
        job.in_flight -= 1
        if job.done:
            self.let_go(job)
        elif part.stop == len(job.tokens):
            right = next((n for n, g in enumerate(part.drafts) if g < 0), len(part.drafts))
            job.entry.num_computed -= len(part.drafts) - right
            job.entry.num_settled = part.stop + right
            for _ in range(1 + right):
                if not job.done:
                    self.sample(job)
            if not job.done:
                job.entry.num_tokens = max(job.entry.num_tokens, len(job.tokens))
                if job.entry.key not in self.scheduler._decoding:
                    self.scheduler.add_decoding(job.entry)
        else:
            job.entry.num_settled = part.stop

    def sample(self, job: Job) -> None:
        if self.caching:
            each = of_blocks(self.keys(job), self.rows)
            for block, key in zip(job.entry.block_table, each, strict=False):
                if block != PASSED:
                    self.pool.publish(block, key)
            for block, key in job.unproven:
                self.pool.prove(block, key)
            job.unproven = []
        job.output += 1
        job.tokens.append(self.token(job, len(job.tokens)))
        if job.output >= (job.shape.stops_at or job.shape.output):
            self.leave(job)

    def token(self, job: Job, index: int) -> int:
        """What a step samples at this place, known here or not."""
        return job.tokens[index] if index < len(job.tokens) else job.shape.family * 1000 + index

    # --- memory with contents ---------------------------------------------------------------------

    def write(
        self, job: Job, start: int, tokens: Sequence[int], only: Collection[int] | None = None
    ) -> None:
        """`only`: in these places of its table."""
        for index, token in enumerate(tokens, start):
            for place, first, _ in self.places(index):
                if only is not None and place not in only:
                    continue
                block = job.entry.block_table[place]
                assert block != PASSED and self.pool.holds([block]), "it is another's"
                assert not self.pool.is_published(block), "others can read it"
                if index == first:
                    self.memory[block] = {}
                self.memory[block][index] = token

    def places(self, index: int) -> list[tuple[int, int, int]]:
        """Of a token's rows: blocks in a table, the first token of each, and who sees it."""
        unit, rest = divmod(index, self.rows.num_tokens)
        first = unit * self.rows.num_tokens
        return [
            (unit * len(self.spans) + column, first + start, window)
            for column, (start, stop, window) in enumerate(self.spans)
            if start <= rest < stop
        ]

    def read(self, job: Job, num_tokens: int) -> None:
        """What the token behind so many sees."""
        for index in range(num_tokens):
            for place, _, window in self.places(index):
                if not window or index > num_tokens - window:
                    block = job.entry.block_table[place]
                    found = self.memory.get(block, {}).get(index)
                    assert found == self.token(job, index), "KV of another text"

    # --- laws -------------------------------------------------------------------------------------

    def check(self, plan: list[Share[Entry]]) -> None:
        bounds = self.bounds
        assert sum(n for _, n, _ in plan) <= bounds.max_step_tokens
        assert all(0 < n <= bounds.max_chunk_tokens or decodes for _, n, decodes in plan)
        assert len({entry.key for entry, _, _ in plan}) == len(plan)
        for entry, count, decodes in plan:
            job = self.jobs[entry.key]
            assert not job.done
            known = len(job.tokens) + bool(job.in_flight and decodes)
            ready = self.ready(job)
            num_drafts = count - 1 if decodes else 0
            assert num_drafts <= len(entry.drafts)
            assert entry.num_computed + count - num_drafts <= known
            assert ready is None or entry.num_computed + count - num_drafts <= ready
            assert len(job.tokens) <= job.shape.prompt + job.shape.output
            if not decodes and ready is not None and ready < len(job.tokens):
                assert ready - entry.num_computed >= bounds.min_partial_tokens, "a crumb"
            assert entry.num_computed + count <= self.rows.room(len(job.entry.block_table))
        sampled = sum(n for _, n, decodes in plan if decodes)
        assert sampled <= max(self.bounds.max_running, len(plan)), "more rows than places"
        for job in self.jobs.values():
            self.check_windows(job)
        held = [block for job in self.jobs.values() for block in job.entry.blocks]
        assert self.pool.num_leased == len(set(held)) <= self.pool.size
        assert self.pool.num_free + self.pool.num_leased == self.pool.size
        if not self.caching:
            assert len(set(held)) == len(held), "a block with two owners"

    def check_windows(self, job: Job) -> None:
        """It has no more blocks of layers with a window than its steps see."""
        entry, rows = job.entry, self.rows
        if job.done or not entry.block_table:
            return
        num_held = rows.num_windowed(len(entry.block_table)) - entry.num_passed
        decodes, bounds = entry.key in self.scheduler._decoding, self.bounds
        runs = decodes or entry.key in self.scheduler._prefilling
        most = rows.live(bounds.depth if decodes else bounds.reach) + len(entry.drafts)
        passed = next(rows.behind(entry.num_settled, entry.num_passed), None)
        assert num_held <= most or passed is None or not runs, "more than a window"
        if not job.shape.image_at:
            assert num_held <= rows.live(bounds.reach) + rows.live(1) + len(entry.drafts)

    def bound(self) -> int:
        """Steps within which everything must have ended: each prompt again for each preemption."""
        last = max((s.arrives + s.ready_after for s in self.shapes), default=0)
        work = sum(s.prompt + s.output + s.ready_after + 4 for s in self.shapes)
        return last + 4 * work + 16

    def run(self) -> None:
        bound = self.bound()
        while self.line or self.under_way or not all(job.done for job in self.jobs.values()):
            assert self.now < bound, self.stuck()
            self.step()
        assert self.pool.num_leased == 0, "blocks are left over"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for job in self.jobs.values():
            wanted = job.shape.stops_at or job.shape.output
            assert job.shape.leaves_after or job.output == wanted

    def stuck(self) -> str:
        left = [j for j in self.jobs.values() if not j.done]
        return f"{len(left)} of {len(self.jobs)} never end: {left[:2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Random requests through the pure scheduler.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started, done, seed = time.perf_counter(), 0, arguments.seed
    preempted = cached = steps = 0
    while done < arguments.requests:
        rng = random.Random(seed)
        blocks = rng.choice((12, 16, 24, 48, 200))
        limits = (rng.choice((2, 8, 16, 64)), rng.choice((1, 7, 16)), rng.choice((1, 4, 32)))
        bounds = StepBounds(*limits, min_partial_tokens=rng.choice((0, 0, 10)))
        caching, ahead = rng.random() < 0.7, rng.random() < 0.5
        rows = windows_of(rng.choice((5, 8, 11))) if rng.random() < 0.5 else PLAIN
        bounds = replace(bounds, depth=1 + ahead)
        crowd = Crowd(draw(rng, 200, blocks, rows), blocks, bounds, caching, ahead, rows=rows)
        try:
            crowd.run()
        except AssertionError:
            print(f"seed {seed}")
            raise
        done, seed = done + len(crowd.jobs), seed + 1
        preempted, cached = preempted + crowd.num_preempted, cached + crowd.num_cached
        steps += crowd.now
    took_s = time.perf_counter() - started
    print(
        f"{done} requests, {steps} steps, {preempted} preemptions, {cached} cached tokens: "
        f"all laws held, in {took_s:.0f} s"
    )


if __name__ == "__main__":
    main()
