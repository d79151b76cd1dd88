"""`epd sim model`: the exhaustive searches, with progress, and what they found."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from epd_lab.formal.searches import SEARCHES, Search
from epd_lab.formal.world import Violation
from epd_lab.sim.campaigns.parallel import interrupts, progress_every_s, results


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._every_s = progress_every_s()
        self._shown_s = self._started_s = time.perf_counter()

    @property
    def took_s(self) -> float:
        return time.perf_counter() - self._started_s

    def __call__(self, num_nodes: int, num_open: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        rate = num_nodes / max(self.took_s, 1e-9)
        told = f"{self._name}: {num_nodes} nodes, {num_open} to look at, {rate:.0f} nodes/s"
        print(told, file=sys.stderr, flush=True)


def model_names() -> tuple[str, ...]:
    """What can be searched."""
    return tuple(dict.fromkeys(search.machine for search in SEARCHES))


def check_models(
    name: str = "all",
    *,
    jobs: int = 1,
    as_json: bool = False,
    searches: tuple[Search, ...] = SEARCHES,
) -> int:
    """Run the searches of a machine, or all, on so many cores; returns the exit status.

    Raises KeyError with the names that there are.
    """
    chosen = [search for search in searches if name in ("all", search.machine)]
    if not chosen:
        raise KeyError(f"no model {name!r}; there are: {', '.join(model_names())}, all")
    runs: list[dict[str, Any]] = []
    interrupted = False
    try:
        with interrupts(), contextlib.closing(results(_run, chosen, jobs)) as found:
            for run in found:
                runs.append(run)
                if not as_json:
                    _show(run)
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
    if interrupted:
        return 130
    return 1 if failed else 0


def _run(search: Search) -> dict[str, Any]:
    progress = _Progress(search.title)
    found: dict[str, Any] = {
        "machine": search.machine,
        "name": search.title,
        "mode": search.mode.value,
        "violations": [],
    }
    try:
        space = search.run(progress)
    except Violation as violation:
        found["violations"].append(str(violation))
    else:
        found |= {"nodes": len(space.parents), "steps": space.num_edges}
    return found | {"wall_s": round(progress.took_s, 2)}


def _show(run: dict[str, Any]) -> None:
    size = f"{run['nodes']:>7} nodes {run['steps']:>8} steps" if "nodes" in run else "FAILED"
    print(f"{run['name']:40} {size} {run['wall_s']:6.1f} s")
    for violation in run["violations"]:
        print(violation)
