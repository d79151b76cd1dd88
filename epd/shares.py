"""Which rank of a producer writes which heads of KV to which rank of a consumer; and which rank of
an encoder runs the tower over which image.

Each rank of the consumer gets each of its heads from one rank that has it.  Heads that several
ranks of the producer have (fewer heads than ranks) are written by these in turn; heads of several
ranks of the consumer go to each of them.  So nothing is gathered, and no rank gets more than its
part; ranks of equal shares write to each other.

States of sequences have heads, too.  The part of a state from one rank to another is one run of
bytes, in slots that the consumer has for the whole state.  Runs lie one behind the other, each from
the beginning of a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shares = Sequence[range]  # the heads of each rank, by their place in the model


class Cell(NamedTuple):
    """What one rank writes to another."""

    producer: int  # ranks
    consumer: int
    source: range  # heads, by their place among the producer rank's own
    target: range  # the same ones, among the consumer rank's own
    is_cut: bool  # they are not all that both have


def cells(producer: Shares, consumer: Shares) -> list[Cell]:
    """All of them, in the order of the consumer's ranks."""
    found: list[Cell] = []
    for rank, wanted in enumerate(consumer):
        at = wanted.start
        while at < wanted.stop:
            holders = [r for r, share in enumerate(producer) if at in share]
            writer = rank if rank in holders else holders[rank % len(holders)]
            share = producer[writer]
            stop = min(share.stop, wanted.stop)
            source = range(at - share.start, stop - share.start)
            target = range(at - wanted.start, stop - wanted.start)
            found.append(Cell(writer, rank, source, target, share != wanted))
            at = stop
    return found


def cut(slots: Sequence[int], heads: range, num_heads: int) -> list[int]:
    """The places of these heads in slots of so many, where each head's part of a slot is a slot."""
    return [slot * num_heads + head for slot in slots for head in heads]


def runs(nbytes: Sequence[int], slot_nbytes: int) -> list[range]:
    """The slots that runs of so many bytes fill, one run behind the other."""
    found, at = [], 0
    for size in nbytes:
        stop = at - (-size // slot_nbytes)
        found.append(range(at, stop))
        at = stop
    return found


def neighbours(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slots side by side as `(first, behind the last)`, in order: one copy for each."""
    begin = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield slots[begin], slots[at - 1] + 1
            begin = at


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each image, by its patches: the largest first, each to whoever has fewest."""
    held = [0] * num_ranks
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[index] = rank = held.index(min(held))
        held[rank] += sizes[index]
    return found


def most(sizes: Sequence[int], num_ranks: int) -> int:
    """Patches of the rank that has most of these images."""
    held = [0] * num_ranks
    for size, rank in zip(sizes, owners(sizes, num_ranks), strict=True):
        held[rank] += size
    return max(held)


def is_cut(found: Sequence[Cell]) -> bool:
    """Whether anything is: then all of it goes head by head."""
    return any(cell.is_cut for cell in found)
