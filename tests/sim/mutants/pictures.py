"""Bugs of pictures that are seen both ways, put back (see `__init__.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from epd.roles.steps import pictures, requests
from epd.scheduling.batching import BatchScheduler
from tests.sim.mutants.planting import Planted, mutant, patched

Runs = Iterable[tuple[int, int]]


@mutant
def a_chunk_ends_a_row_early() -> Planted:
    """F86: the last row of a picture is left to the next chunk."""
    uncut = pictures.uncut

    def early(start: int, count: int, runs: Runs) -> int:
        return uncut(start, count, [(first, end - 1) for first, end in runs])

    return patched(pictures, "uncut", early)


@mutant
def the_next_picture_is_cut() -> Planted:
    """F86: only the first picture that is not computed is looked at."""
    uncut = pictures.uncut

    def first_only(start: int, count: int, runs: Runs) -> int:
        return uncut(start, count, [run for run in runs if run[1] > start][:1])

    return patched(pictures, "uncut", first_only)


@mutant
def what_is_under_way_is_cut_again() -> Planted:
    """F86: a chunk is measured from what is computed, not from what is launched."""

    uncut = requests.uncut

    def behind(request: Any, count: int) -> int:
        with patched(request, "num_under_way", 0):
            return uncut(request, count)

    return patched(requests, "uncut", behind)


@mutant
def a_picture_has_what_decodes_leave() -> Planted:
    """F86: nothing is kept for it; the step is larger than its budget."""
    plan = BatchScheduler.plan

    def plan_late(self: Any, passed_over: Any = ()) -> Any:
        cut, asked = self._uncut, []

        def later(entry: Any, count: int) -> int:
            asked.append(entry)
            return count if len(asked) == 1 else int(cut(entry, count))

        with patched(self, "_uncut", cut and later):
            return plan(self, passed_over)

    return patched(BatchScheduler, "plan", plan_late)
