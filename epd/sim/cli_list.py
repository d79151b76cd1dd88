"""`epd sim list`: which fault is covered by which drill, and what each drill has to notice."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from epd.sim import coverage, drills

MUTANTS_MODULE = "tests.sim.mutants"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"


def load_mutants() -> dict[str, Any]:
    """The bugs to put back.  Raises ValueError outside a checkout."""
    try:
        mutants: dict[str, Any] = importlib.import_module(MUTANTS_MODULE).MUTANTS
    except ModuleNotFoundError:
        raise ValueError("mutants live with the tests: run it in the repository's root") from None
    return mutants


def show_list(args: argparse.Namespace) -> int:
    """Exit status 1 when `--check` finds the document stale."""
    if args.write:
        coverage.write(DOCUMENT)
        print(f"written to {DOCUMENT}")
        return 0
    if args.check:
        stale = coverage.is_stale(DOCUMENT)
        print("stale: epd sim list --write writes it anew" if stale else "up to date")
        return int(stale)
    measured = _measure(range(args.measure), quiet=args.json) if args.measure else {}
    if args.json:
        print(json.dumps(_as_json(measured)))
        return 0
    _print_drills(measured)
    print("\nfault  drills")
    for fault in coverage.faults():
        names = coverage.drills_of(fault)
        print(f"{fault:6} {', '.join(names) or 'none: ' + drills.NOT_REACHABLE[fault]}")
    return 0


def _measure(seeds: range, *, quiet: bool) -> dict[tuple[str, str], int]:
    mutants, found = load_mutants(), {}
    for drill in drills.DRILLS:
        for name in drill.mutants:
            found[drill.name, name] = coverage.caught(mutants, drill, name, seeds)[0]
            if not quiet:
                print(f"{drill.name}: {name}", file=sys.stderr, flush=True)
    return found


def _as_json(measured: dict[tuple[str, str], int]) -> dict[str, Any]:
    rows = [{"name": d.name, "covers": d.covers, "mutants": d.mutants} for d in drills.DRILLS]
    covered = {fault: names for fault in coverage.faults() if (names := coverage.drills_of(fault))}
    caught = [{"drill": d, "mutant": m, "seeds": n} for (d, m), n in measured.items()]
    unreachable = {f: why for f, why in drills.NOT_REACHABLE.items() if f not in covered}
    return {"drills": rows, "covered": covered, "open": unreachable, "caught": caught}


def _print_drills(measured: dict[tuple[str, str], int]) -> None:
    for drill in drills.DRILLS:
        print(f"{drill.name:24} {drill.topology:8} {', '.join(drill.covers) or '-'}")
        for name in drill.mutants:
            count = measured.get((drill.name, name))
            told = "" if count is None else f": caught in {count} seeds"
            print(f"{'':33} must notice {name}{told}")
