"""`epd plan`: which topology serves a load best, before it is built."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from epd.cli.parser import Parser, UsageError, new_file
from epd_lab.bench.verbs.serve import slo_of

if TYPE_CHECKING:
    from epd_lab.bench.traces.form import Trace
    from epd_lab.bench.workload import Workload
    from epd_lab.plan.costs import Costs
    from epd_lab.plan.search import Outcome, PlanWish, Runner

SLO = "ttft=1s,itl=50ms"
DESCRIPTION = f"""
Find the topology of N GPUs that holds an SLO for most requests a second, without a GPU, and print
the command that starts it. The roles that serve run on virtual time, with their placement,
batching, slices, prefix cache and run-ahead; a cost file has what steps, towers and hops take.
Replicas are always among the candidates, and quanta, step budgets and placement are varied. The
second and the third come with what would have to change for them to win: other bounds, another
load. Some minutes on two cores.

A load is a workload of `epd bench serve`; text@30 has 30 arrivals a second instead of users. Or it
is a file of a trace (`epd bench trace TRACE --write FILE`). The SLO bounds the first token (ttft),
99 of 100 gaps between tokens (itl) and the time of a later token (tpot); default {SLO}.

A card has costs here, or a file by `epd bench calibrate`. They hold for one model, and for contexts
and images as far as they were measured; anything else is refused. Groups of ranks have no costs.

--measured takes the gpu.json of `epd bench gpu`, and has how far plans are off. A plan contains no
client at its limit, no interpreter's lock, no other process: trust the order before the distance.
"""
EXAMPLES = (
    ("epd plan --gpus 2 --card h200 --load 1x1080p@20", "two GPUs, 20 requests a second"),
    ("epd plan --load text --slo ttft=500ms,itl=20ms", "the GPUs of this host, other bounds"),
    ("epd plan --costs costs.json --model DIR --load mixed", "a card and a model of your own"),
    ("epd plan --measured gpu.json", "how far plans are off from a measurement"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, metavar="N", help="default: those of this host, or 2")
    parser.add_argument("--card", default="", metavar="NAME", help="default: this host's, or h200")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="instead of --card")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="or a name of the hub, or of a shape: 4b"
    )
    parser.add_argument("--load", default="mixed", metavar="NAME", help="default mixed")
    parser.add_argument("--users", type=int, metavar="N", help="another number of its users")
    parser.add_argument(
        "--slo", default=SLO, metavar="BOUNDS", help=f"default {SLO}; a number alone is in ms"
    )
    parser.add_argument(
        "--topology", dest="topologies", action="append", metavar="NAME",
        help="instead of all sensible ones of --gpus; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--transport", default="", metavar="NAME",
        help="of rows and KV; default: the first of the cost file",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the cluster, which is not varied then; may be repeated",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="default: all cores")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="compare with this gpu.json")
    parser.add_argument(
        "--keep", action="store_true", help="with --measured: note the errors in the cost file"
    )
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw it (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Raises UsageError, ConfigError and ModelError."""
    if args.jobs < 0:
        raise UsageError(f"--jobs {args.jobs}: a number of processes, or 0 for all cores")
    if args.keep and not args.measured:
        raise UsageError("--keep notes the errors of a comparison: add --measured FILE")
    slo_of(args.slo)
    path, known = _known(args)
    with ProcessPoolExecutor(args.jobs or None) as pool:
        return _compare(args, path, known, pool) if args.measured else _plan(args, known, pool)


def best(flags: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Topology and settings of the first alone, for `epd run --auto`.  Raises as `run`."""
    parser = Parser("epd plan", DESCRIPTION, EXAMPLES)
    add_arguments(parser)
    args = parser.parse(flags)
    _, known = _known(args)
    with ProcessPoolExecutor(args.jobs or None) as pool:
        _, order, _ = _searched(args, known, pool)
    return order[0].candidate.topology, order[0].candidate.changes


def _known(args: argparse.Namespace) -> tuple[Path, Costs]:
    """The cost file, which holds for what is asked."""
    from epd_lab.bench.machine import gpus
    from epd_lab.plan import costs, limits
    from epd_lab.plan.run import gpu_settings

    here = gpus()
    args.gpus = (len(here) or 2) if args.gpus is None else args.gpus
    if args.gpus < 1:
        raise UsageError(f"--gpus {args.gpus}: at least 1 is needed")
    card = args.card or next((name.partition(",")[0] for name in here), "h200")
    path = args.costs or costs.of_card(card)
    known = costs.read(path)
    known.hop(args.transport)
    if args.model:
        limits.check_model(known, args.model, gpu_settings(args.assignments))
    return path, known


def _searched(
    args: argparse.Namespace, known: Costs, pool: ProcessPoolExecutor
) -> tuple[PlanWish, list[Outcome], Runner]:
    from epd.topology import parse_topology
    from epd_lab.plan import limits, search, topologies

    load, trace = _load(args)
    requests = list(limits.requests_of(known, load, trace))
    names = args.topologies or topologies.sensible(args.gpus)
    for name in names:
        parse_topology(name)
    slo, assignments = slo_of(args.slo), tuple(args.assignments)
    wish = search.PlanWish(known, load, slo, assignments, args.transport, trace)

    def runner(candidates: Sequence[search.PlanCandidate]) -> list[Outcome]:
        return list(pool.map(partial(search.outcome, wish), candidates))

    return wish, search.search(wish, names, search.stage_s(known, requests), runner), runner


def _plan(args: argparse.Namespace, known: Costs, pool: ProcessPoolExecutor) -> int:
    from epd_lab.bench import plots
    from epd_lab.plan import search

    wish, order, runner = _searched(args, known, pool)
    shown = order[: search.NUM_SHOWN]
    changes = [[], *search.what_changes(wish, shown, runner)]
    title = f"predicted, not measured: {known.model.name} on {known.device}"
    found = {
        "gpus": [title],
        "repeats": 1,
        "command": command_of(args, order[0]),
        "error": str(known.compared or "never compared with a measurement"),
        "rows": [row_of(wish, one) for one in order],
        "wins_with": {one.candidate.topology: c for one, c in zip(shown, changes, strict=True)},
    }
    if args.plot:
        args.plot.write_text(plots.bars(found))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(title, f"error: {found['error']}", "", found["command"], "", sep="\n")
        print(*table(wish, shown, changes), sep="\n")
        others = (f"{o.candidate.topology} {o.goodput(wish.slo):.2f}" for o in order[len(shown) :])
        print("", f"in all: {', '.join(others)}" if len(order) > len(shown) else "", sep="\n")
    return 1 if order[0].errors else 0


def _load(args: argparse.Namespace) -> tuple[Workload, Trace]:
    """One of the two is empty.  Raises UsageError."""
    from epd_lab.bench.traces import form
    from epd_lab.bench.workload import Closed, Workload, named
    from epd_lab.plan.search import scaled

    try:
        if (path := Path(args.load)).is_file():
            if not (trace := form.read(path)):
                raise ValueError(f"{path} has no request")
            return Workload(path.stem, ()), trace
        load = named(args.load)
    except ValueError as error:
        raise UsageError(f"--load: {error}") from None
    if args.users is not None:
        arrival = load.streams[0].arrival
        if not isinstance(arrival, Closed) or args.users < 1:
            raise UsageError(f"--users {args.users}: at least 1, of a load that has users")
        load = scaled(load, args.users / arrival.concurrency)
    return load, ()


def command_of(args: argparse.Namespace, one: Outcome) -> str:
    """To paste."""
    from epd.topology import parse_topology
    from epd_lab.bench.costs import shape

    number = len(parse_topology(one.candidate.topology))
    devices = ",".join(f"cuda:{index}" for index in range(number))
    settings = [f"--set {text}" for text in (*args.assignments, *one.candidate.changes)]
    model = args.model if args.model not in {"", *shape.SIZES} else "DIR"
    where = f"--model {model} --device {devices}"
    return " ".join(["python -m epd run --topology", one.candidate.topology, where, *settings])


def row_of(wish: PlanWish, one: Outcome) -> dict[str, Any]:
    """As those of `epd bench serve`."""
    return {
        "workload": wish.workload.name,
        "stream": wish.workload.name,
        "server": one.candidate.topology,
        "settings": one.candidate.changes,
        "figures": one.figures,
        "errors": one.errors,
    }


def table(wish: PlanWish, order: Sequence[Outcome], changes: Sequence[Sequence[str]]) -> list[str]:
    """A line for each; times in milliseconds, goodput per GPU."""
    from epd.topology import parse_topology

    titles = ("good/s, GPU", "share", "TTFT p50", "p99", "ITL p99")
    lines = [f"{'topology':10}" + "".join(f"{title:>12}" for title in titles) + "  it wins with"]
    for place, (one, found) in enumerate(zip(order, changes, strict=True)):
        good = one.goodput(wish.slo)
        kept = sum(map(wish.slo.kept_by, one.samples)) / max(1, len(one.samples))
        times = [one.figures[f"{name}_ms_{p}"] for name, p in
                 (("ttft", "p50"), ("ttft", "p99"), ("itl", "p99"))]  # fmt: skip
        cells = f"{good / len(parse_topology(one.candidate.topology)):12.2f}{kept:12.0%}" + "".join(
            f"{t:12.1f}" for t in times
        )
        wins = "; ".join(found) or ("nothing near that was tried" if place else "")
        settings = f" ({', '.join(one.candidate.changes)})" if one.candidate.changes else ""
        lines.append(f"{one.candidate.topology:10}{cells}  {wins}{settings}")
    return lines


def _compare(args: argparse.Namespace, path: Path, known: Costs, pool: ProcessPoolExecutor) -> int:
    from epd_lab.bench.servers.figures import Slo
    from epd_lab.bench.workload import named
    from epd_lab.plan import compared, costs
    from epd_lab.plan.run import ForecastPlan, gpu_settings
    from epd_lab.plan.run import run as predict

    report = compared.read_report(args.measured)
    slo = Slo(*(report.slo.get(name, math.inf) for name in ("ttft_s", "tpot_s", "itl_s")))
    settings = gpu_settings(args.assignments)
    plans = [
        ForecastPlan(known, server, named(workload), settings, args.transport, slo)
        for workload, server in dict.fromkeys(r["key"][1::-1] for r in report.rows)
    ]
    rows = [row for found in pool.map(predict, plans) for row in found]
    comparison = compared.comparison(rows, report)
    print(compared.table(rows, report.rows), comparison, sep="\n")
    if args.keep:
        costs.write(msgspec.structs.replace(known, compared=comparison), path)
    return 0
