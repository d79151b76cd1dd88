"""States kept behind beginnings of texts: always those of the very text, and in nobody's way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from epd.layouts import RowBlocks
from epd.scheduling.batching import BatchScheduler, StepBounds
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.snapshots import Snapshots, TakenBlocks, worth_keeping
from tests.scheduling.entry import Entry

STATE = 2
NUM_BLOCKS = 24


@pytest.mark.parametrize(
    ("known", "places"),
    [
        ((0, 0, 1), []),  # it costs more than it saves
        ((0, 0, 2), [2]),  # for the next turn
        ((0, 0, 9), [9]),
        ((9, 9, 9), []),  # there is one
        ((9, 9, 10), []),
        ((0, 9, 9), [9]),
        ((0, 4, 9), [4, 9]),  # texts part there
        ((3, 4, 9), [9]),
        ((0, 8, 9), [8]),
    ],
)
def test_a_state_is_kept_where_it_saves_as_much_as_it_takes(
    known: tuple[int, int, int], places: list[int]
) -> None:
    assert list(worth_keeping(*known, STATE)) == places


@given(st.lists(st.integers(0, 99), min_size=3, max_size=3), st.integers(1, 30))
def test_snapshots_take_no_more_than_the_tokens_before_them(
    counts: list[int], num_blocks: int
) -> None:
    found, known, full = sorted(counts)
    places = list(worth_keeping(found, known, full, num_blocks))
    assert found + len(places) * num_blocks <= max([found, *places])
    assert set(places) <= {known, full}


def keys_of(text: str) -> list[bytes]:
    """A block for each letter; its key tells all before it."""
    return [text[: n + 1].encode() for n in range(len(text))]


def published(pool: BlockPool, snapshots: Snapshots, text: str) -> None:
    """Its KV and the state behind it can be found; nobody holds them."""
    blocks, state = pool.take(len(text)), pool.take(STATE)
    assert blocks is not None and state is not None
    for block, key in zip(blocks, keys_of(text), strict=True):
        pool.publish(block, key)
    snapshots.publish(keys_of(text)[-1], state)
    pool.give_back((*blocks, *state))


def test_the_longest_beginning_with_a_state_is_found() -> None:
    pool = BlockPool(NUM_BLOCKS)
    snapshots = Snapshots(pool, STATE)
    published(pool, snapshots, "abc")
    published(pool, snapshots, "abcdef")
    for text, num_found, kept in (
        ("abcdefg", 6, []),
        ("abcdexyz", 3, [5, 8]),
        ("abxyz", 0, [2, 5]),
        ("xyz", 0, [3]),
    ):
        taken = snapshots.take(keys_of(text), len(text) + STATE, 0)
        assert taken is not None
        assert (taken.num_found, list(taken.kept)) == (num_found, kept)
        assert len(taken.found) == (STATE if num_found else 0)
        held = [*taken.blocks, *taken.found, *(b for blocks in taken.kept.values() for b in blocks)]
        assert pool.num_leased == len(held) == len(set(held))
        pool.give_back(held)


def test_where_there_is_no_room_for_a_state_it_is_computed_again() -> None:
    """Who fits the pool without a snapshot fits it, though one is found, and keeps none."""
    pool = BlockPool(7)
    snapshots = Snapshots(pool, STATE)
    published(pool, snapshots, "abc")
    text = "abcde"
    taken = snapshots.take(keys_of(text), len(text) + STATE, 0)
    assert taken is not None
    assert taken == TakenBlocks(taken.blocks, 0) and pool.num_leased == 7


def test_a_state_that_is_forgotten_in_part_is_not_found() -> None:
    pool = BlockPool(7)
    snapshots = Snapshots(pool, STATE)
    published(pool, snapshots, "abc")
    others = pool.take(3)
    assert others is not None and pool.num_idle == 4
    pool.give_back(others)
    taken = snapshots.take(keys_of("abcd"), 4, 0)
    assert taken is not None and (taken.num_found, taken.found) == (0, ())


def test_what_will_be_received_needs_no_state() -> None:
    """Decode shares the KV that it has, and gets the state with the rest."""
    pool = BlockPool(NUM_BLOCKS)
    blocks = pool.take(3)
    assert blocks is not None
    for block, key in zip(blocks, keys_of("abc"), strict=True):
        pool.publish(block, key)
    pool.give_back(blocks)
    scheduler = BatchScheduler[Entry](pool, RowBlocks(4), StepBounds(64, 64, 8), None, STATE)
    scheduler.reserve(Entry("received", 16), keys_of("abcd"))
    (admission,) = scheduler.admissions()
    assert admission.num_cached == 12 and len(admission.blocks) == 5 + STATE
    assert admission.blocks[STATE : STATE + 3] == blocks
    assert (admission.states_found, dict(admission.states_kept)) == ((), {})
    scheduler.add(Entry("computed", 18), keys_of("abcd"))
    (admission,) = scheduler.admissions()
    assert admission.num_cached == 0 and set(admission.states_kept) == {12}


@dataclass
class Job:
    text: str
    taken: TakenBlocks
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = [block for blocks in self.taken.kept.values() for block in blocks]
        self.blocks = [*self.taken.blocks, *self.taken.found, *kept]


class Texts(RuleBasedStateMachine):
    """Texts come, are computed or called off, in any order; each block remembers its content."""

    snapshots_of: Any = Snapshots

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.snapshots = self.snapshots_of(self.pool, STATE)
        self.jobs: list[Job] = []
        self.content: dict[int, tuple[str, str, int]] = {}

    def read(self, blocks: Sequence[int], kind: str, text: str) -> None:
        """KV of each letter, or a state in parts."""
        texts = [text[: n + 1] if kind == "kv" else text for n in range(len(blocks))]
        found = [self.content.get(block) for block in blocks]
        assert found == [(kind, each, n) for n, each in enumerate(texts)], "of another text"

    def write(self, blocks: Sequence[int], kind: str, text: str, first: int = 0) -> None:
        for n, block in enumerate(blocks, first):
            assert not self.pool.is_published(block), "others can read it"
            self.content[block] = (kind, text[: n + 1] if kind == "kv" else text, n)

    @rule(text=st.text("ab", min_size=1, max_size=8), spare=st.integers(0, 4))
    def come(self, text: str, spare: int) -> None:
        count, num_free = len(text) + STATE + 1, self.pool.num_free
        taken = self.snapshots.take(keys_of(text), count, spare)
        assert taken is not None or count + spare > num_free, "it would have fitted"
        if taken is None:
            assert self.pool.num_free == num_free
            return
        assert self.pool.num_free >= spare
        job = Job(text, taken)
        others = {block for other in self.jobs for block in other.blocks}
        new = set(job.blocks) - set(taken.blocks[: taken.num_found]) - set(taken.found)
        assert not new & others, "a block with two owners"
        self.jobs.append(job)
        for block in new:
            self.content[block] = ("new", "", 0)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """To its end: it reads what was found for it now, however long ago that was."""
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        text, taken = job.text, job.taken
        found = taken.num_found
        self.read(taken.blocks[:found], "kv", text)
        if found:
            self.read(taken.found, "state", text[:found])
        self.write(taken.blocks[found : len(text)], "kv", text, found)
        for block, key in zip(taken.blocks, keys_of(text), strict=False):
            self.pool.publish(block, key)
        for place, blocks in taken.kept.items():
            self.write(blocks, "state", text[:place])
            self.snapshots.publish(keys_of(text)[place - 1], blocks)
        self.pool.give_back(job.blocks)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        self.pool.give_back(self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1))).blocks)

    @invariant()
    def balance(self) -> None:
        held = {block for job in self.jobs for block in job.blocks}
        assert self.pool.num_leased == len(held)
        assert self.pool.num_free + self.pool.num_leased == NUM_BLOCKS


TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class Unheld(Snapshots):
    """A bug: what is found may be given to others before it is read."""

    def take(self, keys: Sequence[bytes], count: int, spare: int) -> TakenBlocks | None:
        taken = super().take(keys, count, spare)
        self._pool.give_back(taken.found if taken is not None else ())
        return taken


class OfAnother(Snapshots):
    """A bug: a state goes by the length of its text."""

    def _keys(self, key: bytes) -> list[bytes]:
        return super()._keys(str(len(key)).encode())


@pytest.mark.parametrize("bug", [Unheld, OfAnother])
def test_the_laws_notice_a_bug(bug: type[Snapshots]) -> None:
    class Wrong(Texts):
        snapshots_of = bug

    with pytest.raises(AssertionError):
        play(Wrong, settings=settings(deadline=None, database=None, phases=[Phase.generate]))
