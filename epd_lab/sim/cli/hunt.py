"""`epd sim mutants`: bugs put back, until each is noticed by a drill or a seed that names it."""

from __future__ import annotations

import argparse
import contextlib
import sys

from epd_lab.sim.campaigns import mutants
from epd_lab.sim.campaigns.hunt import Catch, Hunt, hunt
from epd_lab.sim.campaigns.parallel import Progress, interrupts, results
from epd_lab.sim.campaigns.runner import Summary
from epd_lab.sim.cli.search import as_json, draw, print_json


def mutants_caught(args: argparse.Namespace) -> int:
    """Each mutant under the drills that name it, or the swarm, until one of them notices."""
    names = sorted(mutants.load()) if args.name == "all" else [args.name]
    for name in names:
        mutants.by_name(name)  # a wrong name is told before anything runs
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    hunts = [Hunt(name, seeds) for name in names]
    total, catches = Summary(), []
    progress = Progress("mutants", len(hunts), "mutants")
    try:
        with interrupts(), contextlib.closing(results(hunt, hunts, args.jobs)) as found:
            for catch in found:
                catches.append(catch)
                print(_told(catch), file=sys.stderr if args.json else sys.stdout, flush=True)
                num_survived = sum(c.report is None for c in catches)
                progress.show(len(catches), f"{num_survived} survived")
    except KeyboardInterrupt:
        total.interrupted = True
    total.wall_s = progress.took_s
    return _conclude(args, total, catches)


def _told(catch: Catch) -> str:
    if catch.report is None:
        return f"{catch.mutant:32} SURVIVED {catch.runs} runs"
    first = catch.report.violations[0].split(": ", 1)[-1][:60]
    job = catch.report.job
    return f"{catch.mutant:32} caught by {job.name or job.kind} in {catch.runs} runs ({first})"


def _conclude(args: argparse.Namespace, total: Summary, catches: list[Catch]) -> int:
    caught = [catch.report for catch in catches if catch.report is not None]
    survivors = [f"{c.mutant} survived {c.runs} runs" for c in catches if c.report is None]
    total.reports = sum(catch.runs for catch in catches)
    total.fired = total.reports  # no drill's fault is counted here
    if args.json:
        print_json(total, [as_json(report) for report in caught], survivors, {})
    else:
        outcome = f"{len(caught)} mutants caught, {len(survivors)} survived"
        wall_s = max(total.wall_s, 1e-9)
        ended = "stopped: " if total.interrupted else ""
        print(f"{ended}{outcome}, {total.reports} runs, {total.reports / wall_s:.1f} runs/s")
        for line in survivors:
            print(f"not good enough: mutant {line}")
    draw(args, caught)
    if total.interrupted:
        return 130
    return 1 if survivors else 0
