"""`python -m epd sim`: drills, swarm, search, mutants, replay.

`list` shows what is covered; `drill` and `swarm` search; `check` searches exhaustively;
`mutants` shows that drills notice bugs; `replay` runs one seed again and shows what happened.
Exit status 0: all passed; 1: something failed or a mutant survived; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd.sim import drills, search
from epd.sim.cli_list import load_mutants, show_list
from epd.sim.model.check import check_model
from epd.sim.report import write_report
from epd.sim.run import run
from epd.sim.runner import Job, Report, Summary, execute_all, interrupts
from epd.sim.shrink import Shrinker
from epd.sim.world import TRACE_LENGTH

MAX_PICTURES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `epd sim`."""
    verbs = parser.add_subparsers(dest="sim_verb", required=True, metavar="VERB")
    shown = verbs.add_parser("list", help="drills, the faults that they cover, and what is not")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument(
        "--measure", type=int, default=0, metavar="N", help="run each drill's mutants on N seeds"
    )
    shown.add_argument("--write", action="store_true", help="write the table to docs/simulation.md")
    shown.add_argument("--check", action="store_true", help="exit 1 if that table is stale")
    drill = verbs.add_parser("drill", help="run one drill, or all, under many seeds")
    drill.add_argument("name", help="a drill's name, or all")
    drill.add_argument("--seed", type=int, help="only this seed")
    _add_search(drill, 50)
    swarm = verbs.add_parser("swarm", help="random topologies, workloads and faults")
    _add_search(swarm, 500)
    check = verbs.add_parser("check", help="search small configurations exhaustively")
    check.add_argument(
        "what",
        nargs="?",
        default="model",
        help="model: every interleaving of a transfer's two ends; a topology such as 1e1p1d: "
        "kill -9 of each process at every step of a short run",
    )
    check.add_argument("--stride", type=int, default=1, help="every Nth step only")
    _add_search(check, 0)
    mutants = verbs.add_parser("mutants", help="put known bugs back; the drills must notice")
    mutants.add_argument("name", nargs="?", default="all")
    _add_search(mutants, 30)
    replay = verbs.add_parser("replay", help="one seed again, with its trace")
    replay.add_argument("kind", choices=("drill", "swarm", "steps"))
    replay.add_argument("name", nargs="?", default="")
    replay.add_argument("--seed", type=int, required=True)
    replay.add_argument(
        "--trace",
        type=int,
        nargs="?",
        const=TRACE_LENGTH,
        default=0,
        metavar="N",
        help="the event log, or its last N lines",
    )
    replay.add_argument("--grep", default="", help="only trace lines that contain this")
    replay.add_argument("--shrink", action="store_true", help="find the shortest failing plan")
    _add_picture(replay, "write timeline (SVG), sequence diagram and event log there")


def _add_search(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_picture(parser, "draw the first failures there, as replay --picture does")


def _add_picture(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--picture", type=Path, metavar="DIR", help=what)


def main(args: argparse.Namespace) -> int:
    """Run a parsed `epd sim` command."""
    verbs = {
        "list": show_list,
        "drill": _drill,
        "swarm": _swarm,
        "check": _check,
        "mutants": _mutants,
        "replay": _replay,
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
    for drill in chosen:
        jobs = (Job("drill", drill.name, seed) for seed in _seeds(args))
        summary = execute_all(jobs, len(_seeds(args)), args.jobs, label=drill.name, quiet=args.json)
        _add(total, summary)
        if len(_seeds(args)) >= 10 and summary.fired_share < drill.must_fire:
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
    jobs = (Job("swarm", "", seed) for seed in _seeds(args))
    return _conclude(
        args, execute_all(jobs, args.seeds, args.jobs, label="swarm", quiet=args.json), []
    )


def _check(args: argparse.Namespace) -> int:
    if args.what == "model":
        return check_model(as_json=args.json)
    numbers = range(0, search.num_kills(args.what), args.stride)
    jobs = (Job("steps", args.what, number) for number in numbers)
    return _conclude(
        args, execute_all(jobs, len(numbers), args.jobs, label="steps", quiet=args.json), []
    )


def _add(total: Summary, part: Summary) -> None:
    total.reports += part.reports
    total.fired += part.fired
    total.steps += part.steps
    total.wall_s += part.wall_s
    total.failures += part.failures
    total.interrupted |= part.interrupted


def _conclude(args: argparse.Namespace, summary: Summary, survivors: list[str]) -> int:
    failed = len(summary.failures)
    if args.picture is not None:
        for report in summary.failures[:MAX_PICTURES]:
            write_report(report.job.plan(), report.job.title(), args.picture)
    if args.json:
        runs = [_as_json(report) for report in summary.failures]
        found: dict[str, Any] = {
            "passed": summary.reports - failed,
            "failed": failed,
            "seeds": summary.reports,
            "runs": runs,
            "fired_share": round(summary.fired_share, 4),
            "survivors": survivors,
        }
        print(json.dumps(found))
    else:
        for report in summary.failures[:10]:
            print(f"\n{report.job.command()}")
            for line in report.violations[:4]:
                print(f"    {line}")
        rate = summary.reports / max(summary.wall_s, 1e-9)
        ended = "stopped: " if summary.interrupted else ""
        print(
            f"{ended}{summary.reports - failed} passed, {failed} failed, "
            f"{rate:.1f} runs/s, {summary.steps / max(summary.wall_s, 1e-9):.0f} steps/s"
        )
        for survivor in survivors:
            print(f"not good enough: {survivor}")
    return 1 if failed or survivors or summary.interrupted else 0


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "seed": report.job.seed,
        "name": report.job.name,
        "replay": report.job.command(),
        "violations": report.violations,
    }


def _mutants(args: argparse.Namespace) -> int:
    """Each mutant under the drills that name it, until one of them notices."""
    mutants = load_mutants()
    names = sorted(mutants) if args.name == "all" else [args.name]
    survivors, total = [], Summary()
    started_s = time.perf_counter()
    try:
        with interrupts():
            for name in names:
                caught, runs, noticed = _hunt(mutants, name, _seeds(args))
                total.reports += runs
                if not caught:
                    survivors.append(f"mutant {name} survived {runs} runs")
                if not args.json:
                    how = f"caught by {noticed}" if caught else "SURVIVED"
                    print(f"{name:32} {how} in {runs} runs", flush=True)
    except KeyboardInterrupt:
        total.interrupted = True
    total.wall_s = time.perf_counter() - started_s
    return _conclude(args, total, survivors)


def _hunt(mutants: Any, name: str, seeds: range) -> tuple[bool, int, str]:
    if name not in mutants:
        raise KeyError(f"no mutant {name!r}; there are: {', '.join(sorted(mutants))}")
    runs = 0
    for seed in seeds:
        for drill in _drills_of(name):
            runs += 1
            with mutants[name]():
                result = run(drill.plan(seed))
            if result.violations:
                return True, runs, f"{drill.name} ({result.violations[0].split(': ', 1)[1][:60]})"
    return False, runs, ""


def _drills_of(mutant: str) -> Iterator[drills.Drill]:
    return (drill for drill in drills.DRILLS if mutant in drill.mutants)


def _replay(args: argparse.Namespace) -> int:
    job = Job(args.kind, args.name, args.seed)
    plan = job.plan()
    if args.shrink:
        plan = _shortest(plan)
    print(f"topology {plan.topology}, {len(plan.asks)} requests, network {plan.network}")
    for fault in plan.faults:
        print(f"  fault: {fault}")
    result = run(plan, keep=True)
    assert result.world is not None
    if args.trace or args.grep:
        lines = [line for line in result.world.lines() if args.grep in line]
        print("\n".join(lines[-args.trace :] if args.trace else lines))
    for record in result.records:
        took_s = record.ended_s - record.asked_s
        print(f"  request {record.ask.index}: {record.outcome()} after {took_s:.3f} s")
    for line in result.violations:
        print(f"VIOLATION {line}")
    print(f"digest {result.digest}, {result.steps} steps, {result.virtual_s:.1f} virtual s")
    result.world.close()
    if args.picture is not None:
        for path in write_report(plan, job.title(), args.picture, args.grep):
            print(path)
    return 1 if result.violations else 0


def _shortest(plan: Any) -> Any:
    first = run(plan)
    if first.passed:
        return plan
    checker = first.violations[0].split("]")[0].split("[")[-1]
    fails = Shrinker(lambda p: any(f"[{checker}]" in line for line in run(p).violations))
    return fails.shrink(plan)
