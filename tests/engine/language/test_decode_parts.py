"""Parts of decodes: every key in one of them, and none so long that the others wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epd.engine.language.decode_parts import (
    UNIT,
    join_room,
    parts_at_once,
    parts_of,
    room,
    sum_room,
)
from epd.engine.language.flat_batch import BatchShape, FlatSequence, pack, view

LAYOUT: Any = SimpleNamespace(num_parts=2, num_kv_heads=8)
AT_ONCE = parts_at_once(LAYOUT, beside_prompts=False)


def cut(lengths: list[int], at_once: int = AT_ONCE) -> list[list[int]]:
    """Lengths of each sequence's parts, which are all of its keys, in order."""
    parts, joins = parts_of(np.array(lengths, np.int32), at_once)
    assert len(parts) <= room(len(lengths), at_once)
    assert len(joins) <= join_room(len(lengths), at_once)
    assert parts[:, 0].tolist() == sorted(parts[:, 0].tolist())
    places = {i: list(range(*span)) for i, *span in joins.tolist()}
    assert [place for span in places.values() for place in span] == sorted(set(parts[:, 3]) - {-1})
    assert parts[:, 3].max() < sum_room(len(lengths), at_once)
    found = []
    for i, length in enumerate(lengths):
        mine = parts[parts[:, 0] == i]
        assert mine[:, 3].tolist() == places.get(i, [-1])
        ends = [0, *mine[:, 2].tolist()]
        assert mine[:, 1].tolist() == ends[:-1] and ends[-1] == length
        assert all(begin % UNIT == 0 for begin in ends[:-1])
        found.append(np.diff(ends).tolist())
        assert min(found[-1]) > 0
    return found


def test_every_key_is_in_one_part_and_no_part_is_longer_than_two_even_shares() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        count, at_once = int(rng.integers(1, 257)), int(rng.choice([1, 4, 66, 99, 528]))
        lengths = np.exp(rng.uniform(0, rng.uniform(0.1, 11), count)).astype(int) + 1
        longest = max(max(parts) for parts in cut(lengths.tolist(), at_once))
        share = -(-int((-(-lengths // UNIT)).sum()) // at_once) * UNIT
        rounds = -(-count // at_once)
        assert longest * rounds <= (rounds + 1) * share


def test_one_long_sequence_among_short_ones_is_cut_and_they_are_not_made_to_wait() -> None:
    """The batch that was profiled: what is longest falls from 2,944 keys to 512."""
    *short, long = cut([1150] * 16 + [8700])
    assert len(long) == 17 and max(long) == 512
    assert all(parts == [384, 384, 382] for parts in short)
    *short, long = cut([1150] * 255 + [8700])
    assert max(long) <= 1152 and all(len(parts) == 1 for parts in short)


@pytest.mark.parametrize(
    ("count", "length", "parts"),
    [(1, 1450, 23), (8, 1300, 7), (16, 1150, 4), (32, 1300, 2), (64, 1150, 1), (256, 1150, 1)],
)
def test_equal_sequences_fill_the_device_in_as_few_rounds_as_they_can(
    count: int, length: int, parts: int
) -> None:
    assert [len(found) for found in cut([length] * count)] == [parts] * count


def test_lengths_at_the_edges_of_parts() -> None:
    full = AT_ONCE * UNIT
    more = AT_ONCE // 2 + 1
    for length, parts in ((1, 1), (UNIT, 1), (UNIT + 1, 2), (full, AT_ONCE), (full + 1, more)):
        (found,) = cut([length])
        assert len(found) == parts, length
    assert cut([1, 1, 1]) == [[1], [1], [1]]


def test_a_captured_step_has_room_for_every_list() -> None:
    """What pads is no sequence's, and decodes that are not there have no parts."""
    lengths, table = [900, 1, 64], np.arange(60, dtype=np.int32)
    sequences = [FlatSequence([0], length - 1, table, 0) for length in lengths]
    shape = BatchShape(8, 8, 5, 2, at_once=7)
    data, _ = pack([*sequences, FlatSequence([0, 0], 3, table, 0)], 16, 64, shape)
    batch = view(data, shape, 64)
    parts, joins = parts_of(np.array(lengths, np.int32), 7)
    assert len(parts) < len(batch.parts) == 5 + 7 and len(joins) == 1 < len(batch.joins) == 5
    assert batch.parts[: len(parts)].tolist() == parts.tolist()
    assert batch.joins[: len(joins)].tolist() == joins.tolist()
    assert (batch.parts[len(parts) :] == -1).all() and (batch.joins[len(joins) :] == -1).all()
    empty = view(pack([], 16, 64, shape)[0], shape, 64)
    assert (empty.parts == -1).all() and (empty.joins == -1).all()
