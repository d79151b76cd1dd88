"""Continuous batching where a bound is met exactly, and who comes first where ranks are equal."""

from __future__ import annotations

import pytest

from epd.scheduling.batching import RECEIVED_BONUS_S, BatchScheduler
from epd.scheduling.step_cost import StepCost
from epd.scheduling.vision_batching import next_batch
from tests.scheduling.entry import Entry, admit, grow
from tests.scheduling.test_batching import BLOCK, decoding, scheduler_of


def plan(scheduler: BatchScheduler[Entry]) -> list[tuple[str, int]]:
    return [(entry.key, count) for entry, count, _ in scheduler.plan()]


# --- the line -------------------------------------------------------------------------------------


def test_equal_ranks_enter_as_they_came() -> None:
    scheduler = scheduler_of(64, 10, 6, 8)
    for key in "cab":
        scheduler.add(Entry(key, 4))
    assert admit(scheduler) == ["c", "a", "b"]


def test_of_a_prompt_and_a_reservation_the_older_enters_first() -> None:
    """Of equal ones the reservation: its KV is computed already."""
    for rank, order in ((1.0, ["prompt", "kv"]), (2.0, ["kv", "prompt"]), (3.0, ["kv", "prompt"])):
        scheduler = scheduler_of(64, 10, 6, 8)
        scheduler.add(Entry("prompt", 4, rank))
        scheduler.reserve(Entry("kv", 3, 2.0 + RECEIVED_BONUS_S))
        assert scheduler.num_waiting == 2
        assert admit(scheduler) == order
        assert scheduler.num_waiting == 0


def test_who_leaves_is_known_no_more_and_says_whether_it_stood_in_a_line() -> None:
    scheduler = scheduler_of(64, 10, 6, 8)
    decoding(scheduler, "d", 5)
    for key in ("prompt", "entering"):
        scheduler.add(Entry(key, 4))
    scheduler.reserve(Entry("kv", 3))
    assert scheduler.waits("prompt") and not scheduler.waits("d") and not scheduler.waits("kv")
    assert scheduler.remove("prompt") and scheduler.remove("kv")
    assert admit(scheduler) == ["entering"]
    running = [*scheduler._prefilling, *scheduler._decoding]
    assert running == ["entering", "d"]
    for key in running:
        assert not scheduler.remove(key)
    assert scheduler.num_running == 0
    for key in ("prompt", "kv", "d", "entering", "unknown"):
        assert not scheduler.waits(key) and not scheduler.remove(key)


def test_a_place_is_spare_until_all_are_taken() -> None:
    scheduler = scheduler_of(64, 10, 6, 2)
    for key, is_spare in (("a", True), ("b", False)):
        assert scheduler.has_spare_places
        decoding(scheduler, key, 5)
        assert scheduler.has_spare_places is is_spare


# --- memory ---------------------------------------------------------------------------------------


def filled(num_free: int) -> BatchScheduler[Entry]:
    """Of 200 blocks two are left to those who run; one runs and has all but `num_free`."""
    scheduler = scheduler_of(200, 64, 64, 8)
    decoding(scheduler, "d", (200 - num_free) * BLOCK)
    return scheduler


@pytest.mark.parametrize(("num_free", "enters"), [(3, True), (2, False)])
def test_a_prompt_leaves_blocks_to_those_who_run(num_free: int, enters: bool) -> None:
    scheduler = filled(num_free)
    scheduler.add(Entry("prompt", BLOCK))
    assert admit(scheduler) == ["prompt"] * enters


def test_a_reservation_and_who_is_alone_may_have_all() -> None:
    scheduler = filled(1)
    scheduler.reserve(Entry("kv", BLOCK - 1))
    assert admit(scheduler) == ["kv"]
    alone = scheduler_of(200, 64, 64, 8)
    alone.add(Entry("prompt", 200 * BLOCK))
    assert admit(alone) == ["prompt"]


def test_what_those_who_run_lack_is_not_given_away() -> None:
    scheduler = scheduler_of(3, 64, 64, 8)
    decoding(scheduler, "d", BLOCK).num_tokens += 1
    scheduler.reserve(Entry("kv", 2 * BLOCK - 1))
    assert admit(scheduler) == []


def test_the_oldest_grow_as_far_as_blocks_reach() -> None:
    scheduler = scheduler_of(5, 64, 64, 8)
    for key, rank in (("young", 3.0), ("old", 1.0), ("middle", 2.0)):
        decoding(scheduler, key, BLOCK, rank).num_tokens += 1
    victim = scheduler.victim()
    assert victim is not None and victim.key == "young"
    grown = grow(scheduler)
    assert [(entry.key, len(entry.block_table)) for entry, _ in grown] == [
        ("old", 2),
        ("middle", 2),
    ]
    assert [blocks for _, blocks in grown] == [(3,), (4,)]
    assert plan(scheduler) == [("old", 1), ("middle", 1)], "no step without a block"


def test_nobody_gives_way_where_blocks_just_reach_or_none_can() -> None:
    scheduler = scheduler_of(2, 64, 64, 8)
    only = decoding(scheduler, "only", BLOCK)
    only.num_tokens += 1
    assert scheduler.victim() is None
    assert scheduler._pool.take(1) is not None
    assert scheduler.victim() is only
    only.recomputable = False
    assert scheduler.victim() is None


@pytest.mark.parametrize(("num_free", "grows"), [(3, True), (2, False)])
def test_drafts_get_blocks_that_are_not_scarce(num_free: int, grows: bool) -> None:
    scheduler = filled(num_free)
    for entry in scheduler.decoding:
        entry.drafts = range(1)
    assert bool(grow(scheduler)) is grows


def test_drafts_that_fit_take_no_block() -> None:
    scheduler = scheduler_of(64, 64, 64, 8)
    decoding(scheduler, "fits", BLOCK - 2).drafts = range(2)
    decoding(scheduler, "not", BLOCK - 2).drafts = range(3)
    assert [entry.key for entry, _ in grow(scheduler)] == ["not"]


def test_what_is_cached_up_to_the_last_token_is_found() -> None:
    scheduler = scheduler_of(8, 64, 64, 8)
    for name, num_tokens, num_cached in (("first", 5, 0), ("again", 5, 4), ("whole", 4, 0)):
        scheduler.add(Entry(name, num_tokens), [b"k"][: num_tokens // BLOCK])
        (admission,) = scheduler.admissions()
        assert admission.num_cached == num_cached
        scheduler._pool.publish(admission.blocks[0], b"k")


# --- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_running", "num_prompts"), [(1, 0), (2, 1), (9, 1), (10, 2)])
def test_prompts_keep_an_eighth_of_the_places_that_are_several(
    max_running: int, num_prompts: int
) -> None:
    scheduler = scheduler_of(64, 64, 64, max_running)
    for number in range(12):
        decoding(scheduler, f"d{number}", 2)
    for number in range(4):
        scheduler._prefilling[f"p{number}"] = Entry(
            f"p{number}", 4, float(-number), block_table=(1,)
        )
    step = [key for key, _ in plan(scheduler)]
    assert len(step) == max_running
    assert step[max_running - num_prompts :] == ["p3", "p2"][:num_prompts], "the oldest"


def test_drafts_leave_prompts_their_share() -> None:
    scheduler = scheduler_of(64, 16, 16, 99)
    decoding(scheduler, "d", 2).drafts = range(40)
    scheduler.add(Entry("prompt", 40))
    assert admit(scheduler) == ["prompt"]
    assert len(grow(scheduler)) == 1
    (entry,) = scheduler.decoding
    entry.block_table = tuple(range(11))
    assert plan(scheduler) == [("d", 14), ("prompt", 2)]


def test_a_whole_prompt_is_worth_a_step_however_short() -> None:
    scheduler = scheduler_of(8, 64, 64, 1, 6)
    scheduler.add(Entry("short", 5, num_ready=5))
    assert admit(scheduler) == ["short"]
    assert plan(scheduler) == [("short", 5)]


def test_who_has_one_token_to_compute_has_a_place() -> None:
    scheduler = scheduler_of(64, 64, 64, 1)
    for key in ("one", "next"):
        scheduler.add(Entry(key, 1))
    assert admit(scheduler) == ["one"]


def test_images_that_just_fit_go_together() -> None:
    waiting = [(0, "a", 3), (1, "b", 3), (2, "c", 1)]
    assert next_batch(waiting, 6) == ["a", "b"]
    assert next_batch(waiting[:1], 6, is_behind=True) == ["a"]
    assert next_batch(waiting[:1], 7, is_behind=True) == []


# --- what a step costs ----------------------------------------------------------------------------


def test_what_a_step_costs_is_followed_slowly() -> None:
    cost = StepCost(lambda: 0.0, 2.0)
    cost.observe(0, 0, 5.0)
    cost.observe(0, 9, 5.0)
    cost.observe(1, 9, 5.0)  # a step of decodes alone was not seen yet
    assert (cost.decode_s, cost.token_s, cost.max_prompt_tokens(1)) == (0.0, 0.0, None)
    cost.observe(1, 0, 0.010)
    assert cost.max_prompt_tokens(1) is None
    cost.observe(0, 10, 5.0)  # nobody decoded: nobody was slowed
    assert cost.token_s == 0.0
    cost.observe(1, 0, 0.020)
    assert cost.decode_s == pytest.approx(0.011)
    cost.observe(1, 10, 0.021)
    assert cost.token_s == pytest.approx(0.001)
    cost.observe(1, 10, 0.031)
    assert cost.token_s == pytest.approx(0.0011)


def test_a_quantum_is_kept_before_decodes_were_seen_alone() -> None:
    """Prompts come without a pause from the start on: each step has some."""
    cost = StepCost(lambda: 0.0, max_quantum_s=0.015625)
    assert cost.max_prompt_tokens(1) is None
    cost.observe(0, 4096, 0.0625)
    assert cost.max_prompt_tokens(1) == 1024
    cost.observe(1, 4096, 0.0625)
    assert cost.max_prompt_tokens(1) == 1024
    cost.observe(1, 0, 0.0078125)
    cost.observe(1, 512, 0.015625)  # from now on what is known of steps with both counts
    assert cost.max_prompt_tokens(1) == 512
    cost.observe(0, 4096, 8.0)
    assert cost.max_prompt_tokens(1) == 512


def test_without_a_bound_prompts_take_what_they_like() -> None:
    cost = StepCost(lambda: 0.0)
    cost.observe(1, 0, 0.010)
    cost.observe(1, 10, 0.020)
    assert cost.max_prompt_tokens(1) is None
