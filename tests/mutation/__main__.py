"""`python -m tests.mutation`: which planted slips do the tests not notice?

    python -m tests.mutation --sample 30 --seed 1           # a random sample of all
    python -m tests.mutation --sample 100 --in epd/roles    # of one package, or one file
    python -m tests.mutation --sample 100 --in epd/transport # by the tests of transports
    python -m tests.mutation --all --jobs 16                # hours
    python -m tests.mutation --only 'Bell.ring: self._rung' # those whose name holds this text
    python -m tests.mutation --list                         # what there is to plant

Survivors are told by file and line; exit status 1 if there is one.  `--at-least` asks for a share
of caught ones instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.hunt import Hunt, Verdict, scratch
from tests.mutation.mutants import ROOT, Mutant, modules, of_modules

TARGETS = ("epd/roles", "epd/groups", "epd/scheduling", "epd/fsm")
TRANSPORTS = ("epd/transport",)  # with tests of their own, that start processes
# Not those that plant bugs themselves, that ask programs which may not be there, that test the
# simulator, that start processes of ranks, or that run what `runs.py` runs.
NOT_NEAREST = {
    "test_kv_heads.py",
    "test_row_parts.py",
    "test_state_moves.py",
    "test_tensor_parallel.py",
    "test_coverage.py",
    "test_determinism.py",
    "test_drills.py",
    "test_foreign.py",
    "test_isolation.py",
    "test_loop.py",
    "test_mutants.py",
    "test_report.py",
    "test_runner.py",
    "test_scenarios.py",
    "test_shrink.py",
}
DIRECTORIES = (
    "tests/fsm",
    "tests/scheduling",
    "tests/foreign",
    "tests/groups",
    "tests/roles",
    "tests/sim",
)
OF_TRANSPORTS = ("tests/transport", "tests/contract")
# What the tests need of others; whoever tries mutants imports it once.
LIBRARIES = ("asyncio", "hypothesis", "msgspec", "numpy", "torch", "transformers", "transitions")
REACH = ROOT / "build" / "reach.json"


def targets(asked: argparse.Namespace) -> tuple[str, ...]:
    """Where slips are planted: in transports if that is what is asked for, else in the rest."""
    within = asked.within or ()
    of_transports = within and all(path.startswith(TRANSPORTS) for path in within)
    return tuple(asked.target or (TRANSPORTS if of_transports else TARGETS))


def nearest(where: tuple[str, ...]) -> tuple[str, ...]:
    """The files of tests that may catch something there."""
    directories = OF_TRANSPORTS if where == TRANSPORTS else DIRECTORIES
    found = sorted(file for d in directories for file in (ROOT / d).rglob("test_*.py"))
    chosen = tuple(f.relative_to(ROOT).as_posix() for f in found if f.name not in NOT_NEAREST)
    return chosen if where == TRANSPORTS else (*chosen, "tests/mutation/runs.py")


def parser() -> argparse.ArgumentParser:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    found = argparse.ArgumentParser(
        "python -m tests.mutation",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = found.add_mutually_exclusive_group(required=True)
    which.add_argument("--sample", type=int, metavar="N", help="so many, drawn at random")
    which.add_argument("--all", action="store_true", help="all")
    which.add_argument("--only", action="append", metavar="TEXT", help="whose name holds the text")
    which.add_argument("--list", action="store_true", help="say what there is, and end")
    found.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    found.add_argument("--in", dest="within", action="append", metavar="PATH", help="below a path")
    found.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    found.add_argument("--budget-s", type=float, default=60.0, help="per mutant (default: 60)")
    found.add_argument("--at-least", type=float, metavar="SHARE", help="caught, or exit status 1")
    found.add_argument("--json", type=Path, metavar="FILE", help="write all verdicts")
    # what the tool's own test plants in
    found.add_argument("--target", action="append", help=argparse.SUPPRESS)
    found.add_argument("--test", action="append", help=argparse.SUPPRESS)
    found.add_argument("--reach", type=Path, default=REACH, help=argparse.SUPPRESS)
    return found


def chosen(asked: argparse.Namespace) -> list[Mutant]:
    """The mutants that were asked for, without the equivalent ones."""
    within = tuple(asked.within or [""])
    paths = tuple(path for path in modules(targets(asked)) if path.startswith(within))
    mutants = [m for m in of_modules(paths) if m.key not in EQUIVALENT]
    if asked.only is not None:
        mutants = [m for m in mutants if any(text in m.key for text in asked.only)]
    if asked.sample is not None and asked.sample < len(mutants):
        mutants = random.Random(asked.seed).sample(mutants, asked.sample)
    return mutants


def told(verdict: Verdict) -> dict[str, object]:
    mutant = verdict.mutant
    return {
        "key": mutant.key,
        "line": mutant.line,
        "operator": mutant.operator,
        "caught_by": verdict.caught_by,
        "why": verdict.why,
        "num_tried": verdict.num_tried,
    }


def summary(verdicts: list[Verdict]) -> list[str]:
    """The survivors by file and line, and how many were caught, by package."""
    survivors = [v for v in verdicts if not v.caught_by]
    lines = [
        f"{v.mutant}; {v.why or f'{v.num_tried} tried'}"
        for v in sorted(survivors, key=lambda v: (v.mutant.path, v.mutant.line))
    ]
    of = Counter(v.mutant.package for v in verdicts)
    lost = Counter(v.mutant.package for v in survivors)
    for package, number in sorted(of.items()):
        caught = number - lost[package]
        lines.append(f"{package}: {caught} of {number} caught ({caught / number:.1%})")
    return lines


def main(argv: list[str] | None = None) -> int:
    asked = parser().parse_args(argv)
    mutants = chosen(asked)
    if asked.list:
        print("\n".join(map(str, mutants)))
        return 0
    begun_s = time.monotonic()
    verdicts: list[Verdict] = []
    with scratch() as directory:
        where = targets(asked)
        hunt = Hunt(
            where,
            tuple(asked.test or nearest(where)),
            LIBRARIES if not asked.test else (),
            Path(directory),
            asked.jobs,
            asked.budget_s,
        )
        known = hunt.reach(asked.reach)
        print(f"measured after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)

        def hear(verdict: Verdict) -> None:
            verdicts.append(verdict)
            if not verdict.caught_by:
                print(f"survived: {verdict.mutant}", file=sys.stderr, flush=True)

        hunt.run(mutants, known, hear)
    print("\n".join(summary(verdicts)))
    print(f"{len(verdicts)} mutants in {time.monotonic() - begun_s:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps([told(v) for v in verdicts], indent=1), encoding="utf-8")
    caught = sum(bool(v.caught_by) for v in verdicts)
    return int(caught < len(verdicts) * (1.0 if asked.at_least is None else asked.at_least))


if __name__ == "__main__":
    sys.exit(main())
