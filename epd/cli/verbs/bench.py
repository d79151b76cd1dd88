"""`epd bench`: measure, never test."""

from __future__ import annotations

import argparse

DESCRIPTION = """
Measure a part of epd on this machine and print a table. Both sides of every comparison run in one
process run, and figures are medians of several repeats; say the hardware beside every number.

gateway  the gateway, the bus and the roles with engines that make tokens without a model, against
         an echo by the same HTTP server: requests and streamed tokens per second, added latency,
         and the state machines' share of the CPU time
sim      the simulator on one core: steps of its loop, and whole runs of 24 requests, per second
"""

EXAMPLES = (
    ("epd bench gateway", "about a minute on two cores"),
    ("epd bench gateway --json --repeats 5", "for programs"),
    ("epd bench sim", "some seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("gateway", "sim"), help="what to measure")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from epd.cli.parser import UsageError

    if args.repeats < 1:
        raise UsageError(f"--repeats {args.repeats}: measure at least once")
    if args.what == "sim":
        from epd.sim.bench import run_bench

        return run_bench(args.repeats, as_json=args.json)
    from epd.bench.gateway import Plan
    from epd.bench.gateway import run as run_gateway

    return run_gateway(Plan(repeats=args.repeats), as_json=args.json)
