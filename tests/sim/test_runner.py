"""Many runs: what is counted, and that Ctrl-C ends them with what there is."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from epd.sim.runner import Job, execute_all


def jobs(interrupt_at: int = -1) -> Iterator[Job]:
    for seed in range(40):
        if seed == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        yield Job("drill", "quiet", seed)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_search_still_sums_up(workers: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    summary = execute_all(jobs(interrupt_at=11), 40, workers, quiet=True)
    assert summary.interrupted and 0 < summary.reports <= 11 and summary.steps > 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failing_seed_is_named_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.sim.runner.run", lambda plan: 1 / 0)
    summary = execute_all([Job("drill", "quiet", 3)], 1, 1)
    assert summary.failures[0].violations[0].startswith("[simulator]")
    assert "replay drill quiet --seed 3" in capsys.readouterr().err
