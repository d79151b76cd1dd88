"""The arguments of `epd bench isolation` and `epd bench overlap`, and what they become."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli.configure import options
from epd.cli.parser import UsageError

if TYPE_CHECKING:
    from epd.cli.start.plan import StartPlan as ClusterPlan

MAX_CPUS = 4  # of an instance, unless told: the bundled model has no use for more
SPARE_CPUS = 2  # for the gateway and the load itself

ISOLATION = """\
Sixteen users stream text, and short text requests come now and then, without and with bursts of
requests with four images each: p99 of the time between tokens, and the time to first token of
text. Phases alternate; ratios are medians of the repeats. Each instance gets CPUs of its own where
there are enough (--cpus-per-instance), and the table says if it does not. About three minutes.
"""
OVERLAP = """\
A long text with four images, one request at a time: its time to first token, by the longer of the
two paths that lead there (encoding the images, computing the prompt), each measured alone. One
thread for each instance, so that both paths take long enough to be told apart. A minute.
"""


def add_to(kinds: Any) -> None:
    """Add both parsers; `kinds` is argparse's action of subparsers."""
    isolation = kinds.add_parser("isolation", help="text beside images", description=ISOLATION)
    isolation.add_argument(
        "--topologies", default="1e1p1d,1epd,2epd", metavar="NAMES",
        help="with commas, default 1e1p1d,1epd,2epd",
    )  # fmt: skip
    isolation.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    isolation.add_argument(
        "--phase", type=float, default=6.0, metavar="SECONDS", help="of each phase, default 6"
    )
    overlap = kinds.add_parser("overlap", help="encoding beside prefill", description=OVERLAP)
    overlap.add_argument("--topology", default="1e1p1d", metavar="NAME", help="default 1e1p1d")
    overlap.add_argument("--repeats", type=int, default=5, metavar="N", help="default 5")
    overlap.add_argument(
        "--text-tokens", type=int, default=2000, metavar="N", help="of the text, default 2000"
    )
    for parser in (isolation, overlap):
        parser.add_argument(
            "--json", nargs="?", const="-", default="", metavar="FILE",
            help="print one JSON object, or write it there and print the table",
        )  # fmt: skip
        options.add_place_flags(parser)
        options.add_model_flags(parser)
        options.add_config_flags(parser)


def run_isolation(args: argparse.Namespace) -> int:
    from epd_lab.bench.servers import isolation

    names = tuple(args.topologies.split(","))
    if args.phase <= 0:
        raise UsageError(f"--phase {args.phase:g}: a number of seconds above 0")
    cluster = _clusters(args, names, {})
    plan = isolation.IsolationPlan(
        names, cluster, args.repeats, isolation.IsolationLoad(phase_s=args.phase)
    )
    rows = asyncio.run(isolation.measure(plan))
    _tell(args, isolation.table(rows), isolation.as_objects(rows))
    for row in rows:
        for error in row.errors:
            print(f"{row.topology}: {error}", file=sys.stderr)
    return 1 if any(row.errors for row in rows) else 0


def run_overlap(args: argparse.Namespace) -> int:
    from epd_lab.bench.servers import overlap

    if args.text_tokens < 4:
        raise UsageError(f"--text-tokens {args.text_tokens}: at least 4")
    one_thread = {"engine.threads": args.__dict__["engine.threads"] or 1}
    cluster = _clusters(args, (args.topology,), one_thread)
    plan = overlap.OverlapPlan(args.topology, cluster, args.repeats, args.text_tokens)
    rows = asyncio.run(overlap.measure(plan))
    _tell(args, overlap.table(rows), overlap.as_objects(rows))
    return 0


def _clusters(
    args: argparse.Namespace, names: Sequence[str], changes: dict[str, Any]
) -> Callable[[str], ClusterPlan]:
    """Plans a topology on a free port; each instance, of every topology, has as many CPUs, and
    this process goes where the gateway does: on what the instances have left."""
    from epd.cli.start.plan import plan_topology
    from epd.cli.start.ports import settle_port
    from epd.runtime.cpus import format_cpus, pin, usable_cpus
    from epd.topology import parse_topology

    everything = format_cpus(usable_cpus())
    most = max(len(parse_topology(name)) for name in names)
    if args.cpus_per_instance is None and args.__dict__["engine.cpu_affinity"] is None:
        args.cpus_per_instance = _share(most)
    vars(args).update(changes)
    settings = options.settings_of(args)
    placing, log = options.placing_of(args), options.log_of(args, "warning")

    def plan(name: str) -> ClusterPlan:
        pin(everything)  # what a cluster is planned from
        found = plan_topology(name, settle_port(settings, wanted=args.port), placing, log)
        assert found.gateway is not None
        pin(found.gateway.cpu_affinity)
        return found

    return plan


def _share(num_instances: int) -> int:
    """CPUs for each instance that leave some for the rest; 0 when there are not enough."""
    from epd.runtime.cpus import usable_cpus

    return min(MAX_CPUS, max(0, len(usable_cpus()) - SPARE_CPUS) // num_instances)


def _tell(args: argparse.Namespace, table: str, rows: list[dict[str, Any]]) -> None:
    from epd_lab.bench.machine import describe, sentence

    machine = describe()
    each = args.cpus_per_instance or 0
    found = {"machine": machine, "cpus_per_instance": each, "rows": rows}
    if args.json not in {"", "-"}:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    if args.json == "-":
        print(json.dumps(found))
        return
    note = ""
    if not each and args.__dict__["engine.cpu_affinity"] is None:
        note = (
            "\nThe instances shared their cores (there are too few of them), so what one does "
            "slows the others: this shows the machine, not the separation of stages."
        )
    print(f"{table}\n\n{sentence(machine)}{note}")
