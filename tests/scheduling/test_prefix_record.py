"""The gateway's record of prefixes: bounded, by life, and right about an instance like its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.messages import Address
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.prefix_record import PrefixRecord

P0 = Address("p0", 1, "")
AGAIN = Address("p0", 2, "")


def keys(text: str) -> list[bytes]:
    """A key names all that stands before it."""
    return [text[: n + 1].encode() for n in range(len(text))]


def test_the_longest_known_beginning_is_counted() -> None:
    record = PrefixRecord()
    record.note(P0, keys("abcd"), 100)
    assert record.num_held(P0, keys("abxd")) == 2
    assert record.num_held(P0, keys("abcdef")) == 4
    assert record.num_held(P0, keys("x")) == record.num_held(P0, []) == 0
    assert record.num_held(Address("p1", 1, ""), keys("abcd")) == 0


def test_another_life_knows_nothing() -> None:
    record = PrefixRecord()
    record.note(P0, keys("abcd"), 100)
    assert record.num_held(AGAIN, keys("abcd")) == 0
    record.note(AGAIN, keys("xy"), 100)
    assert (record.num_held(P0, keys("abcd")), record.num_held(AGAIN, keys("xy"))) == (0, 2)
    record.forget("p1", 1)  # nothing was ever sent there
    record.forget("p0", 1)  # the loss of the former one is told late
    assert record.num_held(AGAIN, keys("xy")) == 2
    record.forget("p0", 2)
    assert record.num_tracked("p0") == 0


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=40), st.integers(1, 12))
def test_it_is_bounded_and_forgets_as_the_instance_does(texts: list[str], num_blocks: int) -> None:
    """One text after the other: what the record says of each is what its pool still finds."""
    record, pool = PrefixRecord(), BlockPool(num_blocks)
    for text in texts:
        wanted = keys(text)[:num_blocks]
        assert record.num_held(P0, wanted) == len(pool.find(wanted))
        taken = pool.take_prefix(wanted, len(wanted))
        assert taken is not None
        for block, key in zip(taken[0], wanted, strict=True):
            pool.publish(block, key)
        pool.give_back(taken[0])
        record.note(P0, wanted, num_blocks)
        assert record.num_tracked("p0") <= num_blocks
