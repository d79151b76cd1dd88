"""The arguments of `epd bench peer`, and what they become."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd_lab.bench.verbs.serve import SLO, slo_of, target_of

WORKLOADS = ("text", "3x560", "1x1080p", "4x1080p")
DESCRIPTION = f"""\
Servers of one model side by side on the same cards, of which one is loaded at a time: requests per
second, times, joules per request (of the visible GPUs, by NVML's counter), and goodput by the p99
gap under open arrivals. All get the same bytes, with new images in each repeat, and take turns in
beginning. A SERVER is NAME=URL, NAME=URL,URL for replicas that take turns, or NAME=TOPOLOGY to have
it started; ratios are to the first. Figures are medians. Workloads are those of epd bench serve,
default {", ".join(WORKLOADS)}.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("peer", help="two servers on one card", description=DESCRIPTION)
    parser.add_argument(
        "servers", nargs="+", metavar="SERVER", help="NAME=URL[,URL] or NAME=TOPOLOGY"
    )
    parser.add_argument(
        "--save", type=new_file, required=True, metavar="FILE",
        help="the JSON, written after each repeat; epd diagrams makes a table of it",
    )  # fmt: skip
    parser.add_argument(
        "--workload", dest="workloads", action="append", metavar="NAME", help="may be repeated"
    )
    parser.add_argument(
        "--flags", action="append", default=[], metavar="NAME=TEXT",
        help="how a server was started, for the report; may be repeated",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, metavar="N", help="another number of requests")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S",
        help="begin no repeat but the first that would end later; default: no limit",
    )  # fmt: skip
    parser.add_argument(
        "--open-share", type=float, default=0.67, metavar="X",
        help="of the slowest server's rate arrives in the open loop; default 0.67",
    )  # fmt: skip
    parser.add_argument(
        "--open-s", type=float, default=30.0, metavar="S", help="of open arrivals; default 30"
    )
    parser.add_argument(
        "--slo", default=SLO, metavar="MS", help="of goodput, as epd bench serve; its ttft, too, "
        "of the open arrivals",
    )  # fmt: skip
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.servers import peer
    from epd_lab.bench.servers.serve import ServePlan
    from epd_lab.bench.workload import Closed, Workload, changed, named

    def workload(name: str) -> Workload:
        try:
            found = changed(named(name), None, args.requests)
        except ValueError as error:
            raise UsageError(f"--workload: {error}") from None
        if len(found.streams) > 1 or not isinstance(found.streams[0].arrival, Closed):
            raise UsageError(f"--workload {name}: one stream of users is compared at a time")
        return found

    for flag in ("requests", "seconds", "open_s", "open_share"):
        value = vars(args)[flag]
        if value is not None and value < (0 if flag == "open_s" else 1e-3):
            raise UsageError(f"--{flag.replace('_', '-')} {value}: a number above 0 is needed")
    servers = dict(map(_pair, args.servers))
    plan = ServePlan(
        tuple(replace(target_of(args, text), name=name) for name, text in servers.items()),
        tuple(map(workload, args.workloads or WORKLOADS)),
        args.repeats,
        slo_of(args.slo),
    )
    flags = dict(map(_pair, args.flags))
    if unknown := flags.keys() - servers.keys():
        raise UsageError(f"--flags {unknown.pop()}: no server has that name")
    beside = peer.Beside(flags, args.open_share, args.open_s, args.seconds)
    return peer.run(plan, beside, args.save)


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise UsageError(f"{text!r}: write NAME={value or 'VALUE'}")
    return name, value
