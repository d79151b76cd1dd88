"""How the keys of decodes are cut into parts of about one length, for kernels that sum each apart.

Theory of operation
-------------------
A decode has one query, and reading its keys is all the work.  A program for each sequence would not
fill a device when there are few, and all would wait for the longest.  So keys are cut into parts no
longer than one length, which is the same for all sequences of a step.

A device runs `at_once` parts of every KV head at once, and more parts in further rounds.  A round
takes as long as its longest part, so the estimate of a length is that times the rounds that its
parts need.  The better of two lengths is taken: the shortest whose parts need no more rounds than
whole sequences would, and the shortest with at most `room` parts.  The even share of all keys is
among the latter (each sequence has less than one part beyond its share) and needs one round more at
most.  So however long one sequence is, no part is longer than two such shares.

The parts of one sequence are as even as units allow.  The host lists them, since it has the
lengths; a captured step has a program for each part that has room, and those of no sequence end at
once."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from epd.messages import KvLayout

Ints = np.ndarray[Any, np.dtype[np.int32]]

UNIT = 64  # keys: parts are multiples of it, since kernels read as many at a time
NUM_PROGRAMS = 4 * 132  # of decodes alone: that fit the multiprocessors of a Hopper device at once
NUM_PROGRAMS_BESIDE = 6 * 132  # beside prompts, where few fit at once
NUM_LATENT_PROGRAMS = 132  # each has all heads, and takes a multiprocessor


def parts_at_once(layout: KvLayout, *, beside_prompts: bool) -> int:
    """How many the device runs, with a program for each KV head, or for all of latent rows."""
    if layout.num_parts == 1:
        return NUM_LATENT_PROGRAMS
    return max(1, (NUM_PROGRAMS_BESIDE if beside_prompts else NUM_PROGRAMS) // layout.num_kv_heads)


def room(num_decodes: int, at_once: int) -> int:
    """Parts that so many sequences have at most."""
    return num_decodes + at_once if num_decodes else 0


def join_room(num_decodes: int, at_once: int) -> int:
    """Sequences of several parts: each has one at least of those that are beyond one for each."""
    return min(num_decodes, at_once)


def sum_room(num_decodes: int, at_once: int) -> int:
    """Parts of such sequences, at most."""
    return join_room(num_decodes, at_once) + at_once if num_decodes else 0


def parts_of(lengths: Ints, at_once: int) -> tuple[Ints, Ints]:
    """Of sequences of these lengths, in their order: `[parts, 4]` and `[joins, 3]`.  A part has its
    sequence, its first key, the one behind its last, and its place among the sums to be joined, -1
    if it is all of its sequence.  A join has its sequence, its first place and the one behind its
    last."""
    if not len(lengths):
        return np.empty((0, 4), np.int32), np.empty((0, 3), np.int32)
    units = -(-lengths // UNIT)
    even = -(-units // -(-units // _size(units, at_once)))  # units of each sequence's parts
    counts = -(-units // even)
    sequence = np.repeat(np.arange(len(units)), counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.empty((len(sequence), 4), np.int32)
    parts[:, 0] = sequence
    parts[:, 1] = number * even[sequence] * UNIT
    parts[:, 2] = np.minimum(parts[:, 1] + even[sequence] * UNIT, lengths[sequence])
    is_cut = counts > 1
    parts[:, 3] = np.where(is_cut[sequence], np.cumsum(is_cut[sequence]) - 1, -1)
    ends = np.cumsum(counts[is_cut])
    joins = np.stack([np.flatnonzero(is_cut), ends - counts[is_cut], ends], axis=1)
    return parts, joins.astype(np.int32)


def _size(units: Ints, at_once: int) -> int:
    total, longest, count = int(units.sum()), int(units.max()), len(units)

    def needed(size: int) -> int:
        return int((-(-units // size)).sum())

    def shortest(most: int) -> int:
        enough = min(longest, -(-total // max(1, most - count)))
        sizes = range(-(-total // most), enough)
        return sizes.start + bisect_left(sizes, True, key=lambda size: needed(size) <= most)

    whole = -(-count // at_once) * at_once
    choices = shortest(whole), shortest(room(count, at_once))
    return min(choices, key=lambda size: -(-needed(size) // at_once) * size)
