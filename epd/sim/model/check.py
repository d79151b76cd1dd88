"""`epd sim check`: all searches, with progress, and what they found."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from epd.sim.model.pair import Violation
from epd.sim.model.scenarios import SEARCHES, Search
from epd.sim.runner import interrupts

PROGRESS_EVERY_S = 2.0


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._name = name
        self._quiet = quiet
        self._shown_s = self._started_s = time.perf_counter()

    @property
    def took_s(self) -> float:
        return time.perf_counter() - self._started_s

    def __call__(self, num_pairs: int, num_open: int) -> None:
        now_s = time.perf_counter()
        if self._quiet or now_s - self._shown_s < PROGRESS_EVERY_S:
            return
        self._shown_s = now_s
        rate = num_pairs / max(self.took_s, 1e-9)
        told = f"{self._name}: {num_pairs} pairs, {num_open} to look at, {rate:.0f} pairs/s"
        print(told, file=sys.stderr, flush=True)


def check_model(*, as_json: bool = False, searches: tuple[Search, ...] = SEARCHES) -> int:
    """Run the searches; returns the exit status."""
    runs: list[dict[str, Any]] = []
    interrupted = False
    try:
        with interrupts():
            for search in searches:
                runs.append(_run(search, quiet=as_json))
                if not as_json:
                    _show(runs[-1])
    except KeyboardInterrupt:
        interrupted = True
    failed = sum(bool(run["violations"]) for run in runs)
    if as_json:
        summary = {
            "passed": len(runs) - failed,
            "failed": failed,
            "seeds": len(runs),
            "runs": runs,
            "fired_share": 1.0,
            "survivors": [],
        }
        print(json.dumps(summary))
    else:
        ended = "stopped: " if interrupted else ""
        print(f"{ended}{len(runs) - failed} searches passed, {failed} failed")
    return 1 if failed or interrupted else 0


def _run(search: Search, *, quiet: bool) -> dict[str, Any]:
    progress = _Progress(search.name, quiet=quiet)
    found: dict[str, Any] = {"name": search.name, "mode": search.mode.value, "violations": []}
    try:
        space = search.run(progress)
    except Violation as violation:
        found["violations"].append(str(violation))
    else:
        found |= {"pairs": len(space.parents), "steps": space.num_edges}
    return found | {"wall_s": round(progress.took_s, 2)}


def _show(run: dict[str, Any]) -> None:
    size = f"{run['pairs']:>7} pairs {run['steps']:>8} steps" if "pairs" in run else "FAILED"
    print(f"{run['name']:32} {size} {run['wall_s']:6.1f} s")
    for violation in run["violations"]:
        print(violation)
