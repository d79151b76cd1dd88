"""`epd sim drill | swarm | check`: many runs, and what came of them.

Failures do not end a search unless that is asked for; all of them are listed at its end, each with
the command that replays it.  Progress goes to stderr, so `--json` can be redirected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from epd_lab.sim import drills
from epd_lab.sim.campaigns import mutants, search
from epd_lab.sim.campaigns.runner import Report, SimJob, Summary, execute_all
from epd_lab.sim.reports.report import write_report
from epd_lab.sim.run import describe

MAX_IMAGES = 3
MAX_LINES = 4  # that are told of a failure
CALM_EVERY = 10  # seeds
ENOUGH_SEEDS = 10  # below it the share in which a fault fired says nothing


def drill(args: argparse.Namespace) -> int:
    """One drill, or all, as one search: no core waits for the last seed of a drill.

    Some seeds of each are run without what the drill is about, too: its signs must not show there.
    """
    chosen = drills.DRILLS if args.name == "all" else (drills.by_name(args.name),)
    seeds = _seeds(args)
    runs = [*(("calm", seed) for seed in seeds[::CALM_EVERY]), *(("drill", seed) for seed in seeds)]
    jobs = (SimJob(kind, drill.name, seed) for drill in chosen for kind, seed in runs)
    parts = {drill.name: Summary() for drill in chosen}

    def tell(report: Report) -> None:
        if report.job.kind == "calm":
            return
        part = parts[report.job.name]
        part.add(report)
        if part.reports == len(seeds):
            state = f"{len(part.failures)} FAILED" if part.failures else "passed"
            fired = f"{len(seeds)} seeds, fired {part.fired_share:.0%}"
            print(f"{report.job.name:24} {state} {fired}", file=_told_to(args), flush=True)

    summary = _search(args, jobs, len(chosen) * len(runs), "drill", tell)
    weak = [
        f"{drill.name} fired in {parts[drill.name].fired_share:.0%} of its seeds only"
        for drill in chosen
        if parts[drill.name].reports >= ENOUGH_SEEDS
        and parts[drill.name].fires_too_seldom(drill.must_fire)
    ]
    weak += [
        f"{drill.name}: what it is about happened in none of its seeds"
        for drill in chosen
        if drill.must_fire and parts[drill.name].reports and not parts[drill.name].fired
    ]
    return _conclude(args, summary, weak, parts)


def swarm(args: argparse.Namespace) -> int:
    """Topology, work and faults drawn per seed."""
    jobs: Iterable[SimJob] = (SimJob("swarm", "", seed) for seed in _seeds(args))
    if args.plans:
        jobs = map(_announced, jobs)
    return _conclude(args, _search(args, jobs, args.seeds, "swarm"), [], {})


def check(args: argparse.Namespace) -> int:
    """A kill at every step of a short run."""
    numbers = range(0, search.num_kills(args.topology), args.stride)
    jobs = (SimJob("check", args.topology, number) for number in numbers)
    return _conclude(args, _search(args, jobs, len(numbers), "kills"), [], {})


def _seeds(args: argparse.Namespace) -> range:
    if getattr(args, "seed", None) is not None:
        return range(args.seed, args.seed + 1)
    return range(args.first_seed, args.first_seed + args.seeds)


def _announced(job: SimJob) -> SimJob:
    """The plan is printed before it is run: one that never comes back has a name."""
    print(f"seed {job.seed}: {describe(job.plan())}", file=sys.stderr, flush=True)
    return job


def _search(
    args: argparse.Namespace,
    jobs: Iterable[SimJob],
    total: int,
    label: str,
    tell: Callable[[Report], None] = lambda report: None,
) -> Summary:
    return execute_all(jobs, total, args.jobs, label=label, stop_after=args.stop_after, tell=tell)


def _told_to(args: argparse.Namespace) -> Any:
    return sys.stderr if args.json else sys.stdout


def _conclude(
    args: argparse.Namespace, summary: Summary, weak: list[str], parts: dict[str, Summary]
) -> int:
    failed = len(summary.failures)
    if args.json:
        print_json(summary, [as_json(report) for report in summary.failures], weak, parts)
    else:
        for report in summary.failures:
            print(f"\n{report.job.command()}")
            for line in report.violations[:MAX_LINES]:
                print(f"    {line}")
        _print_summary(summary, f"{summary.reports - failed} passed, {failed} failed")
        for line in weak:
            print(f"not good enough: {line}")
    draw(args, summary.failures)
    if summary.interrupted:
        return 130
    return 1 if failed or weak else 0


def _print_summary(summary: Summary, outcome: str) -> None:
    wall_s = max(summary.wall_s, 1e-9)
    ended = "stopped: " if summary.interrupted else ""
    speed = f"{summary.reports / wall_s:.1f} runs/s, {summary.steps / wall_s:.0f} steps/s"
    print(f"{ended}{outcome}, {speed}, {wall_s:.0f} s")


def print_json(
    summary: Summary, runs: list[dict[str, Any]], weak: list[str], parts: dict[str, Summary]
) -> None:
    """The one object on stdout; `runs`: those that failed, or caught a mutant."""
    failed = len(summary.failures)
    found: dict[str, Any] = {
        "passed": summary.reports - failed,
        "failed": failed,
        "seeds": summary.reports,
        "runs": runs,
        "fired_share": round(summary.fired_share, 4),
        "survivors": weak,
        "interrupted": summary.interrupted,
        "wall_s": round(summary.wall_s, 1),
    }
    if parts:
        found["drills"] = {
            name: {"seeds": p.reports, "failed": len(p.failures), "fired": p.fired}
            for name, p in parts.items()
        }
    print(json.dumps(found))


def as_json(report: Report) -> dict[str, Any]:
    """What a program may read of a run."""
    return {
        "seed": report.job.seed,
        "name": report.job.name,
        "mutant": report.job.mutant,
        "replay": report.job.command(),
        "violations": report.violations,
    }


def draw(args: argparse.Namespace, reports: list[Report]) -> None:
    """Images of the first few, if `--image` asks for them."""
    if args.image is None:
        return
    for report in reports[:MAX_IMAGES]:
        with mutants.planted(report.job.mutant):
            paths = write_report(report.job.plan(), report.job.title(), args.image)
        for path in paths:
            print(path, file=sys.stderr)
