"""`epd sim list`: which fault is covered by which drill, and what each drill has to notice."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from epd_lab.sim import drills
from epd_lab.sim.campaigns import coverage
from epd_lab.sim.campaigns.measure import DrillMeasures, measure

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "drills" / "README.md"


def show_list(args: argparse.Namespace) -> int:
    """Exit status 1: `--check` finds the document stale, or a drill never notices its mutant."""
    if args.check:
        stale = coverage.is_stale(DOCUMENT, DrillMeasures.stored())
        print("stale: epd sim list --write writes it anew" if stale else "up to date")
        return int(stale)
    if args.measure:
        try:
            known = DrillMeasures.stored() if args.missing or args.only else None
            measured = measure(args.measure, args.jobs, known, args.only)
        except KeyboardInterrupt:
            print("stopped: nothing is stored of half a measurement", file=sys.stderr)
            return 130
    else:
        measured = DrillMeasures.stored()
    missed = measured.missed() if args.measure else []
    if args.write:
        if args.measure:
            measured.store()
        coverage.write(DOCUMENT, measured)
        print(f"written to {DOCUMENT}", file=sys.stderr)
    if args.json:
        print(json.dumps(_as_json(measured)))
    elif args.measure or not args.write:
        _print_drills(measured)
        _print_faults()
    for line in missed:
        print(f"not good enough: {line}", file=sys.stderr)
    return int(bool(missed))


def _as_json(measured: DrillMeasures) -> dict[str, Any]:
    rows = [{"name": d.name, "covers": d.covers, "mutants": d.mutants} for d in drills.DRILLS]
    covered = {fault: names for fault in coverage.faults() if (names := coverage.drills_of(fault))}
    caught = [{"drill": d, "mutant": m, "seeds": len(n)} for (d, m), n in measured.caught.items()]
    run = {drill.name: list(measured.seeds(drill.name)) for drill in drills.DRILLS}
    unreachable = {f: why for f, why in drills.NOT_REACHABLE.items() if f not in covered}
    return {
        "drills": rows,
        "covered": covered,
        "open": unreachable,
        "num_seeds": measured.num_seeds,
        "fired": measured.fired,
        "caught": caught,
        "seeds": run,
    }


def _print_drills(measured: DrillMeasures) -> None:
    for drill in drills.DRILLS:
        print(f"{drill.name:24} {drill.topology:8} {', '.join(drill.covers) or '-'}")
        if drill.name in measured.fired:
            print(f"{'':33} happened in {measured.fired_told(drill.name)} seeds")
            print(f"{'':33} tests run the seeds {', '.join(map(str, measured.seeds(drill.name)))}")
        for name in drill.mutants:
            caught = measured.caught_told(drill.name, name)
            print(f"{'':33} must notice {name}: {caught}")


def _print_faults() -> None:
    print("\nfault  drills")
    for fault in coverage.faults():
        names = coverage.drills_of(fault)
        print(f"{fault:6} {', '.join(names) or 'none: ' + drills.NOT_REACHABLE[fault]}")
