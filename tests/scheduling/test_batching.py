"""Continuous batching: budgets, order, no starving, memory never over-promised."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.layouts import RowBlocks
from epd.scheduling.batching import BatchScheduler, StepBounds
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.step_cost import StepCost
from epd.scheduling.vision_batching import next_batch
from epd.scheduling.waiting import Queue
from epd.shares import most
from tests.scheduling.crowd import Crowd
from tests.scheduling.entry import BLOCK, Entry, Shape, admit, drafts_of, draw, grow


def scheduler_of(
    num_blocks: int, *bounds: int, cost: StepCost | None = None
) -> BatchScheduler[Entry]:
    return BatchScheduler(
        BlockPool(num_blocks), RowBlocks(BLOCK), StepBounds(*bounds), cost, drafts_of=drafts_of
    )


def decoding(
    scheduler: BatchScheduler[Entry], key: str, num_tokens: int, rank: float = 0.0
) -> Entry:
    """An entry in the middle of its answer, with just the blocks that it needs."""
    entry = Entry(key, num_tokens, rank, num_computed=num_tokens - 1)
    blocks = scheduler._pool.take(scheduler.blocks_for(num_tokens))
    assert blocks is not None
    entry.block_table = blocks
    scheduler.add_decoding(entry)
    return entry


def test_decodes_first_then_prompts_in_order_of_rank() -> None:
    scheduler = scheduler_of(64, 10, 6, 8)
    decoding(scheduler, "d", 5)
    for key, rank in (("q", 2.0), ("p", 1.0)):
        scheduler.add(Entry(key, 8, rank))
    assert admit(scheduler) == ["p", "q"]
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("d", 1), ("p", 6), ("q", 3)]


def test_admission_stops_at_the_bound() -> None:
    scheduler = scheduler_of(64, 10, 6, 1)
    for key in ("a", "b"):
        scheduler.add(Entry(key, 4))
    assert admit(scheduler) == ["a"]
    scheduler.remove("a")
    assert admit(scheduler) == ["b"]


def test_who_waits_for_an_image_is_passed_and_keeps_its_blocks() -> None:
    scheduler = scheduler_of(64, 32, 16, 1)
    parked = Entry("parked", 12, 0.0, num_ready=5)
    scheduler.add(parked)
    scheduler.add(Entry("other", 8, 1.0))
    assert admit(scheduler) == ["parked"]
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("parked", 5)]
    parked.num_computed = 5
    assert admit(scheduler) == ["other"]  # it takes no place
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("other", 8)]
    parked.num_ready = 12
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("parked", 7)]  # a step has one place
    assert len(parked.block_table) == 3


def test_a_few_tokens_before_an_image_are_not_worth_a_step() -> None:
    pool = BlockPool(8)
    bounds = StepBounds(64, 64, 1, min_partial_tokens=6)
    scheduler = BatchScheduler[Entry](pool, RowBlocks(BLOCK), bounds)
    waits = Entry("waits", 12)
    scheduler.add(waits)
    assert admit(scheduler) == ["waits"]
    waits.num_ready = 5
    assert scheduler.plan() == []
    scheduler.add(Entry("other", 8))
    assert admit(scheduler) == ["other"]  # it takes no place
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("other", 8)]
    waits.num_ready = 6
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("waits", 6)]  # a step has one place
    waits.num_computed = 10
    waits.num_ready = None  # the end of a prompt is worth one, however short
    assert [(e.key, n) for e, n, _ in scheduler.plan()] == [("waits", 2)]


def test_a_step_has_no_more_sequences_than_it_may_and_all_have_their_turn() -> None:
    """KV that arrives enters whatever runs already; prompts keep a share of the places."""
    scheduler = scheduler_of(64, 64, 64, 9)
    for index in range(12):
        scheduler.add_decoding(Entry(f"d{index}", 4, num_computed=3, block_table=(1, 2)))
    steps = [[e.key for e, _, _ in scheduler.plan()] for _ in range(4)]
    assert [len(step) for step in steps] == [9, 9, 9, 9]
    assert {key for step in steps[:2] for key in step} == {f"d{index}" for index in range(12)}
    scheduler._prefilling["prompt"] = Entry("prompt", 8, block_table=(1, 2))
    assert [e.key for e, _, _ in scheduler.plan()][8:] == ["prompt"]


def test_a_bonus_is_worth_waiting_time() -> None:
    """What came 5 s earlier is served before a bonus of 4 s, and after one of 6 s."""
    for bonus, first in ((4.0, "early"), (6.0, "late")):
        scheduler = scheduler_of(2, 8, 8, 1)
        scheduler.add(Entry("late", 8, 15.0 - bonus))
        scheduler.add(Entry("early", 8, 10.0))
        assert admit(scheduler) == [first]


def test_drafts_take_what_is_left() -> None:
    """Of the budget, of the places in the batch, of the blocks; each has its token first."""
    for budget, places, counts in (
        (16, 16, [6, 6]),
        (9, 16, [6, 3]),
        (16, 5, [4, 1]),
        (2, 2, [1, 1]),
    ):
        scheduler = scheduler_of(64, budget, 8, places)
        for key in ("a", "b"):
            decoding(scheduler, key, 9).drafts = range(5)
        assert [len(blocks) for _, blocks in grow(scheduler)] == [1, 1]
        assert [n for _, n, _ in scheduler.plan()] == counts


def test_drafts_are_cut_where_blocks_are_scarce() -> None:
    scheduler = scheduler_of(3, 16, 8, 8)
    decoding(scheduler, "a", 10).drafts = range(5)
    assert not grow(scheduler)
    assert [n for _, n, _ in scheduler.plan()] == [3]


def test_the_youngest_gives_way_to_the_oldest() -> None:
    scheduler = scheduler_of(4, 8, 8, 8)
    old = decoding(scheduler, "old", 8, 1.0)
    young = decoding(scheduler, "young", 8, 2.0)
    assert scheduler.victim() is None
    old.num_tokens += 1
    assert scheduler.victim() is young
    young.num_tokens += 1
    assert scheduler.victim() is young  # not the old one, though both lack a block


def test_who_cannot_be_computed_again_is_spared() -> None:
    """Its rows are gone; it was given all that it can need, so it never asks."""
    scheduler = scheduler_of(4, 8, 8, 8)
    old = decoding(scheduler, "old", 8, 1.0)
    young = decoding(scheduler, "young", 8, 2.0)
    young.recomputable = False
    old.num_tokens += 1
    assert scheduler.victim() is old


def test_more_decodes_than_budget_take_turns() -> None:
    scheduler = scheduler_of(16, 3, 3, 10)
    for number in range(5):
        decoding(scheduler, str(number), 2)
    served = [entry.key for _ in range(5) for entry, _, _ in scheduler.plan()]
    assert len(served) == 15
    assert all(served.count(str(number)) == 3 for number in range(5))


def test_prompts_are_not_starved_by_decodes() -> None:
    scheduler = scheduler_of(64, 16, 16, 99)
    for number in range(30):
        decoding(scheduler, str(number), 2)
    scheduler.add(Entry("prompt", 40))
    assert len(admit(scheduler)) == 1
    step = scheduler.plan()
    assert sum(n for _, n, _ in step) == 16
    assert (step[-1][0].key, step[-1][1]) == ("prompt", 2)


def test_prompts_may_slow_streams_by_so_much() -> None:
    """A step of decodes takes 10 ms, a prompt token 0.1 ms: half as much again is 50 tokens."""
    cost = StepCost(lambda: 0.0, 1.5)
    scheduler = scheduler_of(2000, 1024, 512, 8, cost=cost)
    decoding(scheduler, "d", 2)
    scheduler.add(Entry("p", 4000))
    admit(scheduler)
    assert scheduler.plan()[1][1] == 512  # nothing is known yet
    cost.observe(1, 0, 0.010)
    cost.observe(1, 100, 0.020)
    assert scheduler.plan()[1][1] == 50
    cost.observe(1, 100, 10.0)
    assert scheduler.plan()[1][1] == 35  # one that was held up says little
    for _ in range(10):
        cost.observe(1, 100, 10.0)
    assert scheduler.plan()[1][1] == 16  # never nothing
    scheduler.remove("d")
    assert scheduler.plan()[0][1] == 512  # nobody to be slowed


def test_a_step_may_have_so_many_tokens_for_its_quantum_but_not_for_streams() -> None:
    """Half of a step of 10 ms is 50 tokens, though the device likes 400; 20 ms are 100."""
    cost = StepCost(lambda: 0.0, 1.5, max_quantum_s=0.020, min_step_tokens=400)
    assert cost.max_prompt_tokens(1) is None
    cost.observe(1, 100, 0.020)
    assert cost.max_prompt_tokens(1) == 399, "what prompts add is not known yet"
    cost.observe(1, 0, 0.010)
    cost.observe(1, 100, 0.020)
    assert cost.max_prompt_tokens(1) == 50
    of_quantum = StepCost(lambda: 0.0, 3.0, max_quantum_s=0.020)
    of_quantum.observe(1, 0, 0.010)
    of_quantum.observe(1, 100, 0.020)
    assert of_quantum.max_prompt_tokens(1) == 100, "the shorter of both"


def test_a_step_ends_within_its_quantum() -> None:
    """Of 10 ms a step of decodes leaves 6, which are 500 tokens."""
    cost = StepCost(lambda: 0.0, max_quantum_s=0.010, min_step_tokens=400)
    scheduler = scheduler_of(2000, 8192, 8192, 8, cost=cost)
    decoding(scheduler, "d", 2)
    cost.observe(1, 0, 0.004)
    cost.observe(1, 1000, 0.016)
    prompt = Entry("p", 1378)
    scheduler.add(prompt)
    admit(scheduler)
    pieces = []
    while prompt.num_left:
        (_, count, _) = scheduler.plan()[1]
        prompt.launched(count, ahead=False)
        pieces.append(count)
    assert pieces == [500, 500, 378]
    cost.observe(1, 1000, 1.0)  # decodes alone take longer than the quantum now, say
    scheduler.add(Entry("q", 1000))
    admit(scheduler)
    assert scheduler.plan()[1][1] == 399  # and the decode: 400


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.sampled_from((0, 64, 768)),
    st.floats(0.001, 0.02),
    st.floats(1e-6, 1e-4),
)
def test_no_step_is_longer_than_its_bound_nor_emptier_than_it_need_be(
    num_decodes: int, prompts: list[int], least: int, decode_s: float, token_s: float
) -> None:
    """Beside decodes, what a quantum holds or the least size of a step, whichever is more, goes to
    prompts in order of rank, and all of it, as long as prompts wait."""
    cost = StepCost(lambda: 0.0, max_quantum_s=0.010, min_step_tokens=least)
    cost.observe(1, 0, decode_s)
    cost.observe(1, 1000, decode_s + 1000 * token_s)
    scheduler = scheduler_of(8000, 8192, 8192, 99, cost=cost)
    for number in range(num_decodes):
        decoding(scheduler, f"d{number}", 2)
    entries = [Entry(f"p{rank}", count, rank) for rank, count in enumerate(prompts)]
    for entry in entries:
        scheduler.add(entry)
    admit(scheduler)
    fits = int((0.010 - decode_s) / token_s)
    room = max(16, least - num_decodes, fits)
    while any(entry.num_left for entry in entries):
        waiting = [entry for entry in entries if entry.num_left]
        left = sum(entry.num_left for entry in waiting)
        step = scheduler.plan()
        chunks = step[num_decodes:]
        assert all(decodes for _, _, decodes in step[:num_decodes])
        assert [entry for entry, _, _ in chunks] == waiting[: len(chunks)]
        assert all(n == entry.num_left for entry, n, _ in chunks[:-1]), "one waits for another"
        planned = sum(count for _, count, _ in chunks)
        assert abs(planned - min(left, room, 8192 - num_decodes)) <= 1  # tokens of a float's edge
        for entry, count, _ in chunks:
            entry.launched(count, ahead=False)


SHAPES = st.builds(
    Shape,
    arrives=st.integers(0, 20),
    prompt=st.integers(2, 30),
    output=st.integers(1, 12),
    bonus=st.sampled_from((0, 0, 3, 20)),
    image_at=st.sampled_from((0, 0, 1)),
    ready_after=st.integers(0, 10),
    received=st.booleans(),
    leaves_after=st.sampled_from((0, 0, 0, 1, 5, 12)),
    family=st.integers(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=24),
    st.sampled_from((12, 16, 40)),
    st.sampled_from((1, 2, 7, 16, 64)),
    st.sampled_from((1, 7, 16)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from(((False, False), (True, False), (False, True), (True, True))),
    st.sampled_from((0, 10)),
)
def test_every_law_holds_at_every_step(
    shapes: list[Shape],
    blocks: int,
    budget: int,
    chunk: int,
    running: int,
    how: tuple[bool, bool],
    partial: int,
) -> None:
    """Budgets, blocks, contents, order, and that everybody ends within a bound (F24)."""
    bounds = StepBounds(budget, chunk, running, partial)
    Crowd(shapes, blocks, bounds, caching=how[0], ahead=how[1]).run()


@pytest.mark.parametrize("seed", range(4))
def test_crowds(seed: int) -> None:
    """A sample; `python -m tests.scheduling.crowd --requests 100000` is the whole run."""
    rng = Random(seed)
    how = {"caching": seed % 2 == 0, "ahead": seed > 1}
    crowd = Crowd(draw(rng, 200, 16), 16, StepBounds(16, 7, 32), **how)
    crowd.run()
    assert crowd.num_preempted > 10
    assert bool(crowd.num_cached) is crowd.caching


@pytest.mark.parametrize(
    "bug", ["the oldest gives way", "cached blocks are written", "the line is overtaken"]
)
def test_the_laws_notice_a_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A livelock, a block of another text, an unfair queue."""
    if bug == "the oldest gives way":
        victim = BatchScheduler.victim

        def oldest(self: BatchScheduler[Entry]) -> Entry | None:
            running = [*self._prefilling.values(), *self._decoding.values()]
            young = [e for e in running if e.recomputable or e.key not in self._decoding]
            return victim(self) and min(young, key=lambda e: e.rank, default=None)

        monkeypatch.setattr(BatchScheduler, "victim", oldest)
    elif bug == "cached blocks are written":
        monkeypatch.setattr(Crowd, "keys", lambda self, job: [b"x"] * (len(job.tokens) // BLOCK))
    else:
        monkeypatch.setattr(Queue, "join", _first_come)
    with pytest.raises(AssertionError):
        for seed in range(8):
            Crowd(draw(Random(seed), 200, 16), 16, StepBounds(16, 7, 32)).run()


def _first_come(self: Queue[Entry], rank: float, *who: Any, join: Any = Queue.join) -> None:
    """Joins behind everybody, whatever its rank."""
    join(self, 0.0, *who)


def time_of_a_step(num_finished: int) -> float:
    """Seconds of one round of the step loop with 256 running and 10,000 waiting; the fastest."""
    scheduler = scheduler_of(256 * 16 + 100, 1024, 512, 256)
    for number in range(num_finished):
        scheduler.add(Entry(f"old{number}", 8, float(number)))
        scheduler.remove(f"old{number}")
    for number in range(200):
        decoding(scheduler, f"d{number}", 60, float(number))
    for number in range(10_056):
        scheduler.add(Entry(f"p{number}", 60, float(number)))
    assert len(admit(scheduler)) == 56
    fastest = 1.0
    for _ in range(20):
        started = time.perf_counter()
        scheduler.victim()
        grow(scheduler)
        admit(scheduler)
        assert len(scheduler.plan()) > 200
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def test_a_step_is_planned_in_under_a_millisecond_whatever_has_finished() -> None:
    fresh, old = time_of_a_step(0), time_of_a_step(20_000)
    assert fresh < 1e-3
    assert old < max(2 * fresh, 1e-3)


@given(
    st.lists(st.integers(1, 100), max_size=30), st.integers(1, 120), st.integers(1, 4), st.randoms()
)
def test_vision_batches_keep_order_and_budget(
    patches: list[int], budget: int, num_ranks: int, random: Random
) -> None:
    """Whichever was prepared first: the same images give the same batches."""
    waiting = [(i, str(i), n) for i, n in enumerate(patches)]
    seen: list[str] = []
    while waiting:
        random.shuffle(waiting)
        batch = next_batch(waiting, budget, num_ranks)
        assert batch
        assert len(batch) == 1 or most([patches[int(key)] for key in batch], num_ranks) <= budget
        seen += batch
        waiting = [entry for entry in waiting if entry[1] not in batch]
    assert seen == [str(i) for i in range(len(patches))]
