"""The arguments of `epd bench reuse`, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli.parser import UsageError

if TYPE_CHECKING:
    from epd.cli.start.plan import StartPlan as ClusterPlan

CACHE_NBYTES = 512 << 20  # 300 images of 256 rows of 3 KB: what was evicted would count twice

DESCRIPTION = """\
Images that were sent before, over each transport: 100 requests of 400 text tokens and three
images of 560x560, of which 0, 50 and 90 % repeat. Starts a topology of the bundled model per
transport (it makes 256 rows of such an image, by reducing it to 65,536 pixels), counts encodes,
which must equal the distinct images exactly, and prints the time to first token.
Exit status 1 if an image was not encoded exactly once.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("reuse", help="images seen before", description=DESCRIPTION)
    parser.add_argument(
        "--transports", default="shm,mooncake,file", metavar="NAMES",
        help="with commas, default shm,mooncake,file",
    )  # fmt: skip
    parser.add_argument(
        "--reuse", default="0,50,90", metavar="PERCENT", help="with commas, default 0,50,90"
    )
    parser.add_argument("--topology", default="1e1p1d", metavar="NAME", help="default 1e1p1d")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--concurrency", type=int, default=2, metavar="N", help="default 2 users")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON there, too")


def run(args: argparse.Namespace) -> int:
    from epd.transport.backends import NAMES
    from epd_lab.bench.servers import reuse

    names = tuple(args.transports.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UsageError(f"--transports {unknown[0]}: choose of {', '.join(NAMES)}")
    for flag, number in (("--requests", args.requests), ("--concurrency", args.concurrency)):
        if number < 1:
            raise UsageError(f"{flag} {number}: give at least 1")

    def cluster(transport: str, directory: str) -> ClusterPlan:
        return _cluster(args.topology, transport, directory)

    plan = reuse.ReusePlan(names, cluster, args.requests, args.concurrency, _shares(args.reuse))
    return reuse.run(plan, as_json=args.json, save=args.save)


def _shares(text: str) -> tuple[float, ...]:
    try:
        percents = [int(part) for part in text.split(",")]
    except ValueError:
        percents = [-1]
    if not all(0 <= percent < 100 for percent in percents):
        raise UsageError(
            f"--reuse {text}: whole numbers from 0 to 99, with commas, such as 0,50,90"
        )
    return tuple(percent / 100 for percent in percents)


def _cluster(topology: str, transport: str, directory: str) -> ClusterPlan:
    from epd.cli.configure.settings import build_settings
    from epd.cli.start.plan import LogOptions, Placing, plan_topology
    from epd.cli.start.ports import settle_port

    settings = build_settings(
        flags={
            "transport": transport,
            "transport_directory": directory,
            "engine.threads": 1,
            "encode.cache_device_nbytes": CACHE_NBYTES,
        }
    )
    settings = settle_port(settings, wanted=None)
    return plan_topology(topology, settings, Placing(), LogOptions("warning"))
