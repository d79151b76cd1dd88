"""`epd sim replay`: one run again, shortened if asked, with all that it shows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from epd.api import web
from epd_lab.sim.campaigns import mutants
from epd_lab.sim.campaigns.runner import SimJob, judged
from epd_lab.sim.campaigns.shrink import Shrinker
from epd_lab.sim.reports import page
from epd_lab.sim.reports.report import write_report
from epd_lab.sim.run import Plan, describe, run


def replay(args: argparse.Namespace) -> int:
    """Exit status 1 if the run breaks an invariant."""
    job = SimJob(args.kind, args.name, args.seed, args.mutant)
    plan = job.plan()
    with mutants.planted(args.mutant):
        if args.shrink:
            plan = _shortest(plan)
        _print_plan(plan)
        failed = _show(job, plan, args.trace, args.grep, args.page)
        if args.image is not None:
            for path in write_report(plan, job.title(), args.image, args.grep):
                print(path)
    return int(failed)


def _shortest(plan: Plan) -> Plan:
    shrinker = Shrinker.of(plan)
    if shrinker is None:
        print("it passes: there is nothing to make shorter", file=sys.stderr)
        return plan
    shortest = shrinker.shrink(plan)
    before = f"{len(plan.asks)} requests and {len(plan.faults)} faults"
    after = f"{len(shortest.asks)} and {len(shortest.faults)}"
    print(f"from {before} to {after} in {shrinker.runs} runs", file=sys.stderr)
    return shortest


def _print_plan(plan: Plan) -> None:
    print(describe(plan))
    for ask in plan.asks:
        print(f"  {ask}")
    for fault in plan.faults:
        print(f"  fault: {fault}")


def _show(job: SimJob, plan: Plan, trace: int, grep: str, file: Path | None) -> bool:
    result = run(plan, keep=True)
    violations = judged(job, result)
    assert result.world is not None
    if trace or grep:
        lines = [line for line in result.world.lines() if grep in line]
        print("\n".join(lines[-trace:] if trace else lines))
    for record in result.records:
        took_s = record.ended_s - record.asked_s
        print(f"  request {record.ask.index}: {record.outcome()} after {took_s:.3f} s")
    for line in violations:
        print(f"VIOLATION {line}")
    print(f"digest {result.digest}, {result.steps} steps, {result.virtual_s:.1f} virtual s")
    if file is not None:
        title = f"{job.title()}: {describe(plan)}"
        kept = page.answers_of(result.world.events, result.virtual_s, title, violations)
        file.write_text(web.cluster_file(kept), encoding="utf-8")
        print(file)
    result.world.close()
    return bool(violations)
