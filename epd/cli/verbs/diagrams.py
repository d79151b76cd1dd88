"""`epd diagrams`: the state machines as pictures and tables, from the tables that run."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """
Write docs/state_diagrams: for each state machine its theory, a diagram, the whole matrix of state
and event, and its effects; and one picture of which role sends which message to whom. All of it is
read from the tables and the roles that run, so it cannot be wrong, only stale: --check says so.
"""

EXAMPLES = (
    ("epd diagrams", "write them"),
    ("epd diagrams --check", "fail if a file differs from the code (make check does this)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: docs/state_diagrams of this checkout"
    )


def default_out() -> Path:
    """docs/state_diagrams beside the package.  Raises CommandFailed outside a checkout."""
    from epd.cli.boundary import CommandFailed

    docs = Path(__file__).resolve().parents[3] / "docs"
    if not docs.is_dir():
        raise CommandFailed("this is no checkout of epd; name a directory: --out DIR")
    return docs / "state_diagrams"


def run(args: argparse.Namespace) -> int:
    from epd import diagrams
    from epd.cli.boundary import FAILED, OK

    out = args.out or default_out()
    if not args.check:
        diagrams.write_diagrams(out)
        print(f"written to {out}")
        return OK
    stale = diagrams.check_diagrams(out)
    for name in stale:
        print(f"stale: {name}")
    if stale:
        print("epd diagrams writes them anew")
    return FAILED if stale else OK
