"""The arguments of `epd bench truth`, and what they become."""

from __future__ import annotations

import argparse
from typing import Any

from epd.cli.parser import UsageError

DESCRIPTION = """\
What servers answer to inputs and faults that went wrong somewhere, each from a public report:
pictures twice in a request, many at once, bad ones among good ones, one by another's name, clients
that leave, kill -9.  The servers must have the bundled tiny model,
whose answers are known.  A cell counts outcomes and has what a good request gets behind them.
Without --against a cluster is started, and its processes are killed.  Of a server that runs
already rows of processes are skipped; one row ends the engine of a vLLM 0.32 that gets
rows from elsewhere: name servers of a test only.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("truth", help="right answers under faults", description=DESCRIPTION)
    parser.add_argument("--against", default="", metavar="URL", help="a server that runs")
    parser.add_argument("--peer", default="", metavar="URL", help="another, as a second column")
    parser.add_argument("--rows", default="", metavar="WORDS", help="only those with these words")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for an answer, default 60"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.truth.run import run as run_rows

    if args.peer and not args.against:
        raise UsageError("--peer is a second column: name the first one by --against")
    urls = [url for url in (args.against, args.peer) if url]
    return run_rows(urls, args.rows, args.timeout, as_json=args.json)
