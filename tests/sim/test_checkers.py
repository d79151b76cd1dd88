"""Each checker here has bugs that it notices and nothing else does: without it they survive."""

from __future__ import annotations

import pytest

from epd.sim import checkers, drills
from epd.sim.checkers.base import Checker
from epd.sim.run import run
from tests.sim.mutants import MUTANTS

MAX_SEEDS = 60
ALONE: tuple[tuple[type[Checker], str, str], ...] = (
    (checkers.WakeUps, "leave-the-line", "who_leaves_the_line_wakes_nobody"),
    (checkers.WakeUps, "stall-the-only-encode", "what_is_not_stranded_any_more_is_kept"),
    (checkers.Bounds, "small-pool", "no_peer_has_a_quota"),
    (checkers.Bounds, "cache-tiers", "rows_above_the_budget_stay"),
    (checkers.Bounds, "few-places", "a_step_takes_all_who_decode"),
    (checkers.Bounds, "encoder-runs-ahead", "an_encoder_runs_ahead_for_ever"),
    (checkers.Attempts, "prefill-is-not-missed", "whoever_used_the_lost_is_tried_again"),
    (checkers.Attempts, "failed-writes", "the_next_attempt_goes_where_it_failed"),
    (checkers.Attempts, "words-of-an-attempt-before", "a_word_of_the_last_attempt_ends_this_one"),
    (checkers.Tombstones, "words-of-an-attempt-before", "an_abort_is_confirmed_once"),
    (checkers.FirstToken, "quiet", "a_grant_waits_for_its_retry"),
    (checkers.Durations, "lose-the-only-prefill", "the_silent_are_lost_late"),
)


@pytest.mark.parametrize(("checker", "drill", "mutant"), ALONE, ids=str)
def test_nothing_else_notices(
    checker: type[Checker], drill: str, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = (drills.by_name(drill).plan(seed) for seed in range(MAX_SEEDS))
    with MUTANTS[mutant]():
        plan = next(plan for plan in plans if run(plan).violations)
        others = tuple(other for other in checkers.ALL if other is not checker)
        monkeypatch.setattr(checkers, "ALL", others)
        assert not run(plan).violations
