"""Which heads of KV go from which rank to which: every wanted head once, from who has it."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from epd.engine.sharding import WHOLE, Heads, Shard
from epd.shares import cells, cut


def shares(size: int, num_kv_heads: int, group: int = 8) -> list[range]:
    shards = (Shard(rank, size, WHOLE.collectives) for rank in range(size))
    return [Heads.of(shard, num_kv_heads * group, num_kv_heads).kv for shard in shards]


def check(producer: list[range], consumer: list[range]) -> None:
    found = cells(producer, consumer)
    for rank, wanted in enumerate(consumer):
        to_it = [cell for cell in found if cell.consumer == rank]
        got = [head for cell in to_it for head in wanted[cell.target.start : cell.target.stop]]
        assert got == list(wanted), "each head once, in order"
        for cell in to_it:
            sent = producer[cell.producer][cell.source.start : cell.source.stop]
            assert sent == wanted[cell.target.start : cell.target.stop], "from a rank that has it"
            assert cell.is_cut == (producer[cell.producer] != wanted)
        assert len(to_it) == 1 or all(cell.is_cut for cell in to_it)


def test_every_rank_gets_its_heads_from_those_who_have_them() -> None:
    """All sizes of groups and numbers of heads, shared evenly, unevenly and replicated."""
    for num_kv_heads, p, c in product(range(1, 10), range(1, 9), range(1, 9)):
        check(shares(p, num_kv_heads), shares(c, num_kv_heads))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_whatever_the_sizes(num_kv_heads: int, p: int, c: int) -> None:
    check(shares(p, num_kv_heads, 64), shares(c, num_kv_heads, 64))


def test_equal_groups_write_rank_to_rank() -> None:
    for num_kv_heads, size in product(range(1, 9), range(1, 9)):
        same = shares(size, num_kv_heads)
        found = cells(same, same)
        assert [(cell.producer, cell.is_cut) for cell in found] == [
            (rank, False) for rank in range(size)
        ]


def test_a_head_that_many_have_is_sent_by_these_in_turn() -> None:
    four, two = shares(4, 2), shares(2, 2)
    assert four == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [cell.producer for cell in cells(four, two)] == [0, 3]
    assert [cell.producer for cell in cells(two, four)] == [0, 0, 1, 1]
    assert [cell.producer for cell in cells(shares(4, 1), shares(8, 1))] == [0, 1, 2, 3] * 2


def test_the_places_of_heads() -> None:
    assert cut([5, 2], range(1, 3), 4) == [21, 22, 9, 10]
