"""Continuous batching: one budget per step, decodes first, no starving, nothing computed twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.scheduling.batching import BatchScheduler, Entry
from epd.scheduling.vision_batching import next_batch


def test_decodes_first_then_prompts_in_order() -> None:
    scheduler = BatchScheduler(max_step_tokens=10, max_chunk_tokens=6, max_running=8)
    scheduler.add_decoding(Entry("d", 5, 0, 5))
    for key in ("p", "q"):
        entry = Entry(key, 8, 1)
        scheduler.add(entry)
        scheduler.admit(entry)
    assert [(e.key, n) for e, n in scheduler.plan()] == [("d", 1), ("p", 6), ("q", 3)]


def test_admission_stops_at_the_bound() -> None:
    scheduler = BatchScheduler(10, 6, max_running=1)
    first, second = Entry("a", 4, 1), Entry("b", 4, 1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.next_admission() is first
    scheduler.admit(first)
    assert scheduler.next_admission() is None
    scheduler.remove("a")
    assert scheduler.next_admission() is second


def test_more_decodes_than_budget_take_turns() -> None:
    scheduler = BatchScheduler(max_step_tokens=3, max_chunk_tokens=3, max_running=10)
    for number in range(5):
        scheduler.add_decoding(Entry(str(number), 1, 0, 1))
    served = [entry.key for _ in range(5) for entry, _ in scheduler.plan()]
    assert len(served) == 15
    assert all(served.count(str(number)) == 3 for number in range(5))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=20),
    st.integers(1, 32),
    st.integers(1, 16),
    st.integers(1, 8),
)
def test_every_request_ends_within_a_bound(
    shapes: list[tuple[int, int]], budget: int, chunk: int, running: int
) -> None:
    """Random prompts and lengths: budgets hold in every step, each token is computed once."""
    scheduler = BatchScheduler(budget, chunk, running)
    left = {str(i): output for i, (_, output) in enumerate(shapes)}
    computed = dict.fromkeys(left, 0)
    for i, (prompt, _) in enumerate(shapes):
        scheduler.add(Entry(str(i), prompt, 1))
    bound = sum(-(-prompt // min(chunk, budget)) + output for prompt, output in shapes) + len(
        shapes
    )
    for _ in range(bound):
        while (entry := scheduler.next_admission()) is not None:
            scheduler.admit(entry)
        step = scheduler.plan()
        if not step:
            break
        assert sum(n for _, n in step) <= budget
        assert scheduler.num_running <= running
        assert len({entry.key for entry, _ in step}) == len(step)
        for entry, n in step:
            assert entry.decoding is (n == 1 and entry.num_computed >= entry.num_prompt)
            entry.num_computed += n
            computed[entry.key] += n
            if entry.num_computed < entry.num_prompt:
                continue
            left[entry.key] -= 1
            if left[entry.key] == 0:
                scheduler.remove(entry.key)
            elif not entry.decoding:
                scheduler.add_decoding(entry)
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert all(count == 0 for count in left.values())
    assert all(computed[str(i)] == prompt + output - 1 for i, (prompt, output) in enumerate(shapes))


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 120))
def test_vision_batches_keep_order_and_budget(patches: list[int], budget: int) -> None:
    waiting = [(str(i), n) for i, n in enumerate(patches)]
    sizes = dict(waiting)
    seen: list[str] = []
    while waiting:
        batch = next_batch(waiting, budget)
        assert batch
        assert len(batch) == 1 or sum(sizes[key] for key in batch) <= budget
        seen += batch
        waiting = waiting[len(batch) :]
    assert seen == [str(i) for i in range(len(patches))]
