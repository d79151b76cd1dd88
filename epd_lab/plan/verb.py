"""The arguments of `epd sim plan`, and what they become."""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from epd.cli.parser import UsageError
from epd_lab.bench.verbs.serve import SLO, slo_of

DESCRIPTION = """\
Predict what topologies do, without a GPU: requests per second, goodput, time to first token (TTFT)
and between tokens (ITL). The roles that serve run on virtual time, with their placement, batching,
slices, prefix cache and run-ahead; how long steps, towers and hops take comes from a cost file, and
what users send from the workloads of `epd bench`. Some seconds per topology and workload.

A cost file is written by `epd bench calibrate`, for one model on one kind of GPU. Without
--costs it is the bundled one: one NVIDIA H200, the shape of Qwen3-VL-4B in bfloat16.

Settings that change what a step costs, such as --quantization, need a cost file of their own.

--measured takes the gpu.json of `epd bench gpu` and prints how far off the prediction is, row by
row. A prediction knows nothing of a gateway or a client at its limit, of the interpreter's lock, or
of other processes: trust the order of rows before their distance, and differences above a tenth.
"""
WORKLOADS = ("text", "3x560", "1x1080p", "4x1080p", "mixed")


def add_to(verbs: Any) -> None:
    """Add the parser; `verbs` is argparse's action of subparsers."""
    parser = verbs.add_parser(
        "plan",
        help="what topologies of so many GPUs will do, by measured step costs",
        description=DESCRIPTION,
    )
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="default: the bundled one")
    parser.add_argument(
        "--topology", dest="topologies", action="append", metavar="NAME",
        help="instead of all sensible ones of --gpus; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--workload", dest="workloads", action="append", metavar="NAME",
        help=f"as in epd bench serve; may be repeated; default {', '.join(WORKLOADS)}",
    )  # fmt: skip
    parser.add_argument(
        "--transport", default="", metavar="NAME",
        help="of rows and KV between instances; default: the first of the cost file",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the cluster, such as engine.max_quantum_ms=0; may be repeated",
    )  # fmt: skip
    parser.add_argument("--slo", default=SLO, metavar="MS", help="of goodput, as epd bench serve")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="medians of; default 1")
    parser.add_argument(
        "--users", type=int, metavar="N",
        help="as in epd bench gpu; default: as many to a GPU as two have, which is 2 for four",
    )  # fmt: skip
    parser.add_argument(
        "--times", type=int, default=1, metavar="N", help="requests, as in epd bench gpu"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="default: all cores")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="compare with this gpu.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (SVG)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Raises UsageError and ConfigError."""
    from epd.topology import parse_topology
    from epd_lab.bench import plots
    from epd_lab.bench.servers import figures
    from epd_lab.bench.workload import NAMED, chosen, users_of
    from epd_lab.plan import compared, costs, page, topologies
    from epd_lab.plan.run import ForecastPlan, gpu_settings
    from epd_lab.plan.run import run as predict

    users = users_of(args.gpus) if args.users is None else args.users
    counts = {"gpus": args.gpus, "users": users, "repeats": args.repeats, "times": args.times}
    for flag, number in counts.items():
        if number < 1:
            raise UsageError(f"--{flag} {number}: at least 1 is needed")
    known = costs.read(args.costs or costs.BUNDLED)
    known.hop(args.transport)
    measured = compared.read_measured(args.measured) if args.measured else []
    names = args.topologies or topologies.sensible(args.gpus)
    for name in names:
        parse_topology(name)
    try:
        workloads = chosen(args.workloads or WORKLOADS, users=users, times=args.times)
    except ValueError as error:
        raise UsageError(f"--workload: {error}") from None
    for workload in workloads:
        if workload.file is not None:
            raise UsageError(
                f"--workload {workload.file}: what is in a file of bodies is not known here; "
                f"choose one of {', '.join(NAMED)}"
            )
    settings, slo = gpu_settings(args.assignments), slo_of(args.slo)
    plans = [
        ForecastPlan(known, name, workload, settings, args.transport, slo, args.repeats)
        for workload in workloads
        for name in names
    ]
    with ProcessPoolExecutor(args.jobs or None) as pool:
        rows = [row for found in pool.map(predict, plans) for row in found]
    rows.sort(key=lambda row: [w.name for w in workloads].index(row["workload"]))
    found = {
        "gpus": [f"predicted, not measured: {known.model.name} on {known.device}"],
        "sources": known.sources,
        "repeats": args.repeats,
        "rows": rows,
        "errors": compared.errors(rows, measured),
    }
    if args.plot:
        args.plot.write_text(plots.bars(found))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    if args.markdown:
        print(page.markdown(rows))
        return 0
    print(*found["gpus"])
    print(figures.table(rows))
    if measured:
        print()
        print(compared.table(rows, measured))
    return 1 if any(row["errors"] for row in rows) else 0
