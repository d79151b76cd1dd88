"""The arguments of `epd bench truth`, and what they become."""

from __future__ import annotations

import argparse
from typing import Any

from epd.cli.parser import UsageError

DESCRIPTION = """\
What servers answer to inputs that went wrong somewhere, each from a public report: pictures twice
in a request, many at once, bad ones among good ones, one by another's name, clients that leave, a
killed encoder.  All servers must have the bundled tiny model, whose answers are known.  The rows
are measured in one run, one server after the other in each row; a cell counts outcomes and has what
a good request gets behind them.  The last row ends the engine of a vLLM 0.32
that gets rows from elsewhere: name servers of a test only.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("truth", help="right answers under faults", description=DESCRIPTION)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="columns of the table")
    parser.add_argument(
        "--kill", action="append", default=[], metavar="NAME=PID",
        help="the process of an encoder of that server, for the row that kills it",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for an answer, default 60"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.truth.run import run as run_rows

    urls = dict(_pair(text, "NAME=URL") for text in args.servers)
    pids = {}
    for name, text in (_pair(text, "--kill NAME=PID") for text in args.kill):
        if name not in urls or not text.isdigit():
            raise UsageError(f"--kill {name}={text}: write NAME=PID, with the name of a server")
        pids[name] = int(text)
    return run_rows(urls, pids, args.timeout, as_json=args.json)


def _pair(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{text}: write {form}")
    return name, value
