"""KV blocks by content: keys tell texts and images apart, shared blocks are never given away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd.messages import Address, MediaItem
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.pool import PoolError
from epd.scheduling.prefix_keys import PrefixKeys

BLOCK = 4


def keys_of(tokens: list[int], *images: tuple[str, int, int], scope: str = "") -> list[bytes]:
    """Keys of a text with images `(mm_hash, offset, num_rows)`."""
    items: Any = [
        SimpleNamespace(mm_hash=name, offset=offset, end=offset + rows)
        for name, offset, rows in images
    ]
    keys = PrefixKeys(BLOCK, items, scope)
    return keys.extend(lambda start, stop: tokens[start:stop], len(tokens))


def num_equal(one: list[bytes], other: list[bytes]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_keys_are_of_full_blocks_and_of_all_before_them() -> None:
    text = list(range(14))
    assert len(keys_of(text)) == 3
    assert num_equal(keys_of(text), keys_of([*text[:12], 99, 99, 99, 99])) == 3
    assert num_equal(keys_of(text), keys_of([*text[:4], 99, *text[5:]])) == 1
    assert num_equal(keys_of(text), keys_of([99, *text[1:]])) == 0  # block 2 and 3 look the same
    assert len(set(keys_of([7] * 12))) == 3  # equal tokens in another place


@given(st.lists(st.integers(0, 3), min_size=BLOCK, max_size=30), st.text(), st.text())
def test_two_scopes_have_no_key_in_common(tokens: list[int], one: str, other: str) -> None:
    """Fault F53: neither the first block nor any other says what another tenant has asked."""
    shared = set(keys_of(tokens, scope=one)) & set(keys_of(tokens, scope=other))
    assert bool(shared) is (one == other)


@given(st.lists(st.integers(0, 3), min_size=BLOCK, max_size=30), st.text(max_size=3))
def test_two_adapters_have_no_key_in_common(tokens: list[int], scope: str) -> None:
    """Fault F53: what one has computed never answers for another, nor for the model itself."""
    names = ("", "a" * 32, "b" * 32)
    each = [PrefixKeys(BLOCK, (), scope, name) for name in names]
    found = [keys.extend(lambda a, b: tokens[a:b], len(tokens)) for keys in each]
    assert len({key for keys in found for key in keys}) == sum(map(len, found))
    assert found[0] == keys_of(tokens, scope=scope)


def test_no_two_of_many_texts_collide() -> None:
    """F81: a part of a digest would be enough for few."""
    texts = [[n] * BLOCK for n in range(2000)]
    assert len({key for text in texts for key in keys_of(text)}) == len(texts)


def test_two_images_of_one_size_never_collide() -> None:
    text = [1, 1, 7, 7, 7, 7, 7, 7, 1, 1, 1, 1]
    one, other = keys_of(text, ("a", 2, 6)), keys_of(text, ("b", 2, 6))
    assert num_equal(one, other) == 0
    assert num_equal(one, keys_of(text, ("a", 2, 6))) == 3
    assert num_equal(one, keys_of(text)) == 0


def test_one_image_in_two_places_never_collides() -> None:
    """Adjacent images share placeholders: only where each begins tells them apart."""
    text = [7] * 12
    assert num_equal(keys_of(text, ("a", 0, 6)), keys_of(text, ("a", 2, 6))) == 0
    assert num_equal(keys_of(text, ("a", 0, 4), ("b", 4, 8)), keys_of(text, ("a", 0, 8))) == 1
    swapped = keys_of(text, ("b", 0, 6), ("a", 6, 6))
    assert num_equal(keys_of(text, ("a", 0, 6), ("b", 6, 6)), swapped) == 0


def test_a_video_with_text_between_its_frames_is_seen_in_each_block() -> None:
    """Its rows reach further than their number: no block behind is taken for text."""
    nobody = Address("e", 1, "")
    item = MediaItem(
        index=0,
        mm_hash="a",
        offset=2,
        num_rows=6,
        grid_thw=(3, 2, 4),
        room="r",
        encoder=nobody,
        offsets=(2, 7, 14),
    )
    assert item.end == 16
    assert item.runs() == [(2, 0, 2), (7, 2, 2), (14, 4, 2)]
    text = [5] * 20
    for at, _, count in item.runs():
        text[at : at + count] = [7] * count
    far = PrefixKeys(BLOCK, [item], "")
    far.keys = [b"x"] * 3  # whatever stands before, the last rows are this video's
    other = PrefixKeys(BLOCK, [msgspec.structs.replace(item, mm_hash="b")], "")
    other.keys = [b"x"] * 3
    assert far.extend(lambda a, b: text[a:b], 16)[3] != other.extend(lambda a, b: text[a:b], 16)[3]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(1, 9), max_size=6))
def test_a_growing_text_has_the_keys_of_the_whole(tokens: list[int], steps: list[int]) -> None:
    grown, length = PrefixKeys(BLOCK, (), ""), 0

    def known(start: int, stop: int) -> list[int]:
        assert stop <= length, "it reads what is not there yet"
        return tokens[start:stop]

    for step in steps:
        length = min(len(tokens), length + step)
        assert grown.extend(known, length) == keys_of(tokens[:length])
    assert grown.extend(known, length // 2) == keys_of(tokens[: length // 2]), "of its beginning"


def test_each_image_in_a_block_counts() -> None:
    text = [7] * 4
    one = keys_of(text, ("a", 0, 2), ("b", 2, 2))
    assert one != keys_of(text, ("a", 0, 2), ("c", 2, 2)) != keys_of(text, ("a", 0, 2))
    assert [len(key) for key in one] == [16]


def test_contents_are_forgotten_oldest_first_and_tails_before_beginnings() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks is not None
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_idle, pool.num_leased) == (4, 3, 0)
    assert pool.take(2) is not None  # the empty one, then the tail
    assert pool.find([b"a", b"b", b"c"]) == list(blocks[:2])
    taken = pool.take_prefix([b"a", b"x"], 2)
    assert taken is not None
    shared, num_found = taken
    assert (shared[0], num_found) == (blocks[0], 1)
    assert pool.find([b"b"]) == []  # it had to go
    assert pool.take(1) is None


def test_found_blocks_that_are_idle_are_not_counted_as_room() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.give_back(blocks)
    assert pool.take_prefix([b"a", b"b"], 3) is None
    assert pool.take_prefix([b"a", b"b"], 2, spare=1) is None
    assert pool.take_prefix([b"a", b"b"], 2) == ((blocks[0], blocks[1]), 2)


def test_blocks_are_leased_lowest_first_and_then_as_they_came_back() -> None:
    pool = BlockPool(3)
    assert [pool.take(1) for _ in range(3)] == [(0,), (1,), (2,)]
    pool.give_back((1,))
    pool.give_back((0,))
    assert [pool.take(1) for _ in range(2)] == [(1,), (0,)]


def test_a_block_has_one_content_as_long_as_it_is_kept() -> None:
    pool = BlockPool(2)
    assert pool.take(2) == (0, 1)
    pool.publish(0, b"a")
    pool.publish(0, b"b")  # said twice
    pool.publish(1, b"a")  # equal to another
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([0], [])
    assert pool.is_published(0) and not pool.is_published(1)


def test_what_was_noted_is_found_when_it_is_proven_unless_it_was_taken() -> None:
    pool = BlockPool(3)
    assert pool.take(3) == (0, 1, 2)
    for block, key in enumerate((b"a", b"b", b"a")):
        pool.note(block, key)
        pool.give_back((block,))
    assert (pool.num_free, pool.num_idle) == (3, 3)
    assert pool.find([b"a"]) == pool.find([b"b"]) == []
    assert pool.take(1) == (0,), "the oldest"
    for block, key in enumerate((b"a", b"b", b"a")):
        pool.prove(block, key)
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([2], [1])
    assert pool.take(2) == (1, 2) and pool.find([b"a"]) == pool.find([b"b"]) == []


def test_of_what_was_noted_twice_one_is_found() -> None:
    pool = BlockPool(3)
    assert pool.take(3) == (0, 1, 2)
    for block in (0, 1):
        pool.note(block, b"a")
        pool.prove(block, b"a")
        pool.give_back((block,))
    assert (pool.find([b"a"]), pool.num_idle) == ([0], 1)
    pool.note(2, b"b")
    pool.give_back((2,))
    assert pool.take(3) is not None and pool.find([b"a"]) == []


def test_a_shared_block_is_free_when_its_last_owner_gives_it_back() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    assert blocks is not None
    pool.share(blocks)
    pool.share(blocks[1:])
    pool.give_back(blocks)
    assert pool.num_free == 0
    pool.give_back(blocks)
    assert pool.num_free == 1
    pool.give_back(blocks[1:])
    assert pool.num_free == 2
    with pytest.raises(PoolError, match="shared but is not leased"):
        pool.share(blocks)


def test_what_is_not_leased_cannot_be_published_or_returned() -> None:
    pool = BlockPool(2)
    with pytest.raises(PoolError):
        pool.publish(0, b"a")
    with pytest.raises(PoolError, match="not leased"):
        pool.give_back((0,))


class BlockBooks(RuleBasedStateMachine):
    """Any order of leasing, sharing, publishing and returning, against a naive model."""

    leases: Bundle = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.leased: list[int] = []
        self.content: dict[int, bytes] = {}  # what each block holds, as its owner wrote it
        self.noted: list[tuple[int, bytes]] = []

    @rule(
        target=leases,
        keys=st.lists(st.sampled_from((b"a", b"b", b"c")), max_size=3, unique=True),
        extra=st.integers(0, 3),
    )
    def take(self, keys: list[bytes], extra: int) -> tuple[int, ...]:
        taken = self.pool.take_prefix(keys, len(keys) + extra)
        if taken is None:
            return ()
        blocks, num_found = taken
        for block, key in zip(blocks[:num_found], keys, strict=False):
            assert self.content[block] == key, "another content under this key"
        for block in blocks[num_found:]:
            assert block not in self.leased, "a block with two owners"
            self.content[block] = b""
        for block, key in zip(blocks[num_found:], keys[num_found:], strict=False):
            self.content[block] = key
            self.pool.publish(block, key)
        self.leased += blocks
        return blocks

    @rule(key=st.sampled_from((b"a", b"b", b"c")))
    def give_up(self, key: bytes) -> None:
        """It is written, and goes back before others may find it."""
        if (taken := self.pool.take(1)) is not None:
            (block,) = taken
            self.content[block] = key
            self.pool.note(block, key)
            self.pool.give_back(taken)
            self.noted.append((block, key))

    @rule()
    def prove(self) -> None:
        for block, key in self.noted:
            self.pool.prove(block, key)
        self.noted.clear()

    @rule(blocks=consumes(leases))
    def give_back(self, blocks: tuple[int, ...]) -> None:
        self.pool.give_back(blocks)
        for block in blocks:
            self.leased.remove(block)

    @invariant()
    def balance(self) -> None:
        assert self.pool.num_leased == len(set(self.leased))
        assert self.pool.num_free + self.pool.num_leased == self.pool.size
        assert self.pool.holds(self.leased)


TestBlockBooks = BlockBooks.TestCase
