"""`python -m epd sim`: drills, swarm, exhaustive searches, mutants, replay.

`list` shows what is covered; `drill` and `swarm` search; `check` kills at every step; `model`
searches exhaustively; `mutants` shows that drills notice bugs; `replay` runs one seed again and
shows what happened.  Exit status 0: all passed; 1: something failed or a mutant survived; 2: usage;
130: stopped by Ctrl-C, after a summary of what there was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from epd.sim import drills, mutants, search
from epd.sim.cli_list import show_list
from epd.sim.cli_replay import replay
from epd.sim.hunt import Catch, Hunt, hunt
from epd.sim.model.check import check_models, model_names
from epd.sim.parallel import Progress, interrupts, results
from epd.sim.report import write_report
from epd.sim.run import describe
from epd.sim.runner import Job, Report, Summary, execute_all
from epd.sim.world import TRACE_LENGTH

MAX_PICTURES = 3
MAX_TOLD = 10
ENOUGH_SEEDS = 10  # below it the share in which a fault fired says nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `epd sim`."""
    verbs = parser.add_subparsers(dest="sim_verb", required=True, metavar="VERB")
    _add_list(verbs.add_parser("list", help="drills, the faults that they cover, and what is not"))
    drill = verbs.add_parser("drill", help="run one drill, or all, under many seeds")
    drill.add_argument("name", help="a drill's name, or all")
    drill.add_argument("--seed", type=int, help="only this seed")
    _add_seeds(drill, 50)
    _add_search(drill)
    swarm = verbs.add_parser("swarm", help="random topologies, workloads and faults")
    swarm.add_argument("--plans", action="store_true", help="print each plan before it is run")
    _add_seeds(swarm, 500)
    _add_search(swarm)
    check = verbs.add_parser("check", help="kill -9 of each process at every step of a short run")
    check.add_argument("topology", help="such as 1e1p1d or 2e2p2d")
    check.add_argument("--stride", type=_positive, default=1, metavar="N", help="every Nth step")
    _add_search(check)
    model = verbs.add_parser("model", help="search small configurations exhaustively")
    names = ", ".join(model_names())
    model.add_argument("name", nargs="?", default="all", help=f"one of {names}; or all")
    model.add_argument("--json", action="store_true", help="print one JSON object")
    mutant = verbs.add_parser("mutants", help="put known bugs back; the drills must notice")
    mutant.add_argument("name", nargs="?", default="all", help="a mutant's name, or all")
    _add_seeds(mutant, 30)
    _add_search(mutant)
    _add_replay(verbs.add_parser("replay", help="one seed again, with its trace"))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--measure",
        type=_positive,
        default=0,
        metavar="N",
        help="run each drill, and it with each of its mutants, on N seeds; minutes",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables to docs/simulation.md"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if those tables are stale")
    _add_jobs(parser)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("drill", "swarm", "check"))
    parser.add_argument("name", nargs="?", default="", help="a drill, or a topology to check")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mutant", default="", metavar="NAME", help="with this bug put back")
    parser.add_argument(
        "--trace",
        type=_positive,
        nargs="?",
        const=TRACE_LENGTH,
        default=0,
        metavar="N",
        help="the event log, or its last N lines",
    )
    parser.add_argument("--grep", default="", help="only trace lines that contain this")
    parser.add_argument("--shrink", action="store_true", help="find the shortest failing plan")
    _add_picture(parser, "write timeline (SVG), sequence diagram and event log there")


def _add_seeds(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument(
        "--seeds", type=_positive, default=seeds, metavar="N", help=f"how many; default {seeds}"
    )
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")


def _add_search(parser: argparse.ArgumentParser) -> None:
    _add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_picture(parser, "draw the first failures there, as replay --picture does")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    jobs = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=_positive, default=jobs, metavar="N", help="processes; default: all cores"
    )


def _add_picture(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--picture", type=Path, metavar="DIR", help=what)


def main(args: argparse.Namespace) -> int:
    """Run a parsed `epd sim` command."""
    verbs = {
        "list": show_list,
        "drill": _drill,
        "swarm": _swarm,
        "check": _check,
        "model": _model,
        "mutants": _mutants,
        "replay": replay,
    }
    try:
        return verbs[args.sim_verb](args)
    except (KeyError, ValueError) as error:
        print(f"epd sim: {error.args[0] if error.args else error}", file=sys.stderr)
        return 2


def _seeds(args: argparse.Namespace) -> range:
    if getattr(args, "seed", None) is not None:
        return range(args.seed, args.seed + 1)
    return range(args.first_seed, args.first_seed + args.seeds)


def _drill(args: argparse.Namespace) -> int:
    chosen = drills.DRILLS if args.name == "all" else (drills.by_name(args.name),)
    total, weak = Summary(), []
    seeds = _seeds(args)
    for drill in chosen:
        jobs = (Job("drill", drill.name, seed) for seed in seeds)
        summary = execute_all(jobs, len(seeds), args.jobs, label=drill.name, quiet=args.json)
        total.add(summary)
        if len(seeds) >= ENOUGH_SEEDS and summary.fired_share < drill.must_fire:
            weak.append(f"{drill.name} fired in {summary.fired_share:.0%} of its seeds only")
        if not args.json:
            state = "failed" if summary.failures else "passed"
            print(
                f"{drill.name:24} {state} {summary.reports} seeds, fired {summary.fired_share:.0%},"
                f" {summary.reports / max(summary.wall_s, 1e-9):.1f} runs/s"
            )
        if summary.interrupted:
            break
    return _conclude(args, total, weak)


def _swarm(args: argparse.Namespace) -> int:
    jobs: Iterable[Job] = (Job("swarm", "", seed) for seed in _seeds(args))
    if args.plans:
        jobs = map(_announced, jobs)
    summary = execute_all(jobs, args.seeds, args.jobs, label="swarm", quiet=args.json)
    return _conclude(args, summary, [])


def _announced(job: Job) -> Job:
    """The plan is told before it is run: what never comes back is known by name."""
    print(f"seed {job.seed}: {describe(job.plan())}", file=sys.stderr, flush=True)
    return job


def _check(args: argparse.Namespace) -> int:
    numbers = range(0, search.num_kills(args.topology), args.stride)
    jobs = (Job("check", args.topology, number) for number in numbers)
    summary = execute_all(jobs, len(numbers), args.jobs, label="kills", quiet=args.json)
    return _conclude(args, summary, [])


def _model(args: argparse.Namespace) -> int:
    return check_models(args.name, as_json=args.json)


def _conclude(args: argparse.Namespace, summary: Summary, weak: list[str]) -> int:
    failed = len(summary.failures)
    if args.json:
        _print_json(summary, [_as_json(report) for report in summary.failures], weak)
    else:
        for report in summary.failures[:MAX_TOLD]:
            print(f"\n{report.job.command()}")
            for line in report.violations[:4]:
                print(f"    {line}")
        _print_summary(summary, f"{summary.reports - failed} passed, {failed} failed")
        for line in weak:
            print(f"not good enough: {line}")
    _draw(args, summary.failures)
    if summary.interrupted:
        return 130
    return 1 if failed or weak else 0


def _print_json(summary: Summary, runs: list[dict[str, Any]], weak: list[str]) -> None:
    failed = len(summary.failures)
    found: dict[str, Any] = {
        "passed": summary.reports - failed,
        "failed": failed,
        "seeds": summary.reports,
        "runs": runs,
        "fired_share": round(summary.fired_share, 4),
        "survivors": weak,
    }
    print(json.dumps(found))


def _print_summary(summary: Summary, outcome: str) -> None:
    wall_s = max(summary.wall_s, 1e-9)
    ended = "stopped: " if summary.interrupted else ""
    speed = f"{summary.reports / wall_s:.1f} runs/s, {summary.steps / wall_s:.0f} steps/s"
    print(f"{ended}{outcome}, {speed}")


def _draw(args: argparse.Namespace, reports: list[Report]) -> None:
    if args.picture is None:
        return
    for report in reports[:MAX_PICTURES]:
        with mutants.planted(report.job.mutant):
            paths = write_report(report.job.plan(), report.job.title(), args.picture)
        for path in paths:
            print(path, file=sys.stderr)


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "seed": report.job.seed,
        "name": report.job.name,
        "mutant": report.job.mutant,
        "replay": report.job.command(),
        "violations": report.violations,
    }


def _mutants(args: argparse.Namespace) -> int:
    """Each mutant under the drills that name it, until one of them notices."""
    names = sorted(mutants.load()) if args.name == "all" else [args.name]
    for name in names:
        mutants.by_name(name)  # a wrong name is told before anything runs
    hunts = [Hunt(name, _seeds(args)) for name in names]
    total, catches = Summary(), []
    progress = Progress("mutants", len(hunts), "mutants", quiet=args.json)
    try:
        with interrupts(), contextlib.closing(results(hunt, hunts, args.jobs)) as found:
            for catch in found:
                catches.append(catch)
                if not args.json:
                    print(_told(catch), flush=True)
                num_survived = sum(c.report is None for c in catches)
                progress.show(len(catches), f"{num_survived} survived")
    except KeyboardInterrupt:
        total.interrupted = True
    total.wall_s = progress.took_s
    return _conclude_hunts(args, total, catches)


def _told(catch: Catch) -> str:
    if catch.report is None:
        return f"{catch.mutant:32} SURVIVED {catch.runs} runs"
    first = catch.report.violations[0].split(": ", 1)[-1][:60]
    return f"{catch.mutant:32} caught by {catch.report.job.name} in {catch.runs} runs ({first})"


def _conclude_hunts(args: argparse.Namespace, total: Summary, catches: list[Catch]) -> int:
    caught = [catch.report for catch in catches if catch.report is not None]
    survivors = [f"{c.mutant} survived {c.runs} runs" for c in catches if c.report is None]
    total.reports = sum(catch.runs for catch in catches)
    total.fired = total.reports  # no drill's fault is counted here
    if args.json:
        _print_json(total, [_as_json(report) for report in caught], survivors)
    else:
        outcome = f"{len(caught)} mutants caught, {len(survivors)} survived"
        wall_s = max(total.wall_s, 1e-9)
        ended = "stopped: " if total.interrupted else ""
        print(f"{ended}{outcome}, {total.reports} runs, {total.reports / wall_s:.1f} runs/s")
        for line in survivors:
            print(f"not good enough: mutant {line}")
    _draw(args, caught)
    if total.interrupted:
        return 130
    return 1 if survivors else 0
