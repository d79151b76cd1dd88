"""The arguments of `epd bench trace`, and what they become."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd_lab.bench.traces.shapes import DRAWN
from epd_lab.bench.verbs.serve import SLO, slo_of, target_of

if TYPE_CHECKING:
    from epd_lab.bench.traces.form import TraceRequest

DESCRIPTION = f"""\
Replay a trace, each request when it is due: against a server, or in the simulator with the step
costs of a cost file (epd plan). Figures of each kind of request, with goodput by --slo, how late
the client itself was, and how many pictures were sent, differ and were encoded: where the caches
hold them, each that differs is encoded once.

TRACE is a file: of `--write` (a JSON object a line, docs/simulation.md), of Mooncake or of BurstGPT
(.csv); a directory of ServeGen's clients; or a shape that is drawn: {DRAWN}, and the workloads of
epd bench serve, whose users become Poisson arrivals.
"""
FOR_S, PER_S = 60.0, 1.0


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("trace", help="a day as it was", description=DESCRIPTION)
    parser.add_argument("trace", metavar="TRACE", help="file, directory or shape")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--url", metavar="SERVER", help="URL, several with commas, or a topology that is started"
    )
    where.add_argument("--sim", metavar="TOPOLOGY", help="simulate it")
    where.add_argument("--write", type=new_file, metavar="FILE", help="only write the trace")
    parser.add_argument(
        "--rate", type=float, metavar="PER_S",
        help="so many requests a second: a file's times are stretched; a shape's default is 1",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of the trace, default all; of a shape 60"
    )
    parser.add_argument("--only", metavar="KIND", help="leave out all other kinds")
    parser.add_argument(
        "--slo", action="append", default=[], metavar="[KIND:]MS",
        help=f"of goodput, as epd bench serve, default {SLO}; may be repeated for kinds",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one has other texts and pictures"
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="of --sim: as epd plan")
    parser.add_argument(
        "--parts", type=int, default=1, metavar="N",
        help="of --sim: at a time, each behind 20 s of requests that do not count; where no queue "
        "grows and little is repeated the figures are those of one",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write the JSON there, too")
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from epd_lab.bench.servers import figures
    from epd_lab.bench.traces import form, replay

    for flag in ("rate", "seconds", "parts"):
        if (number := vars(args)[flag]) is not None and not 0 < number < math.inf:
            raise UsageError(f"--{flag} {number:g}: a number above 0 is needed")
    if args.parts > 1 and not args.sim:
        raise UsageError("--parts cuts what is simulated: add --sim TOPOLOGY")
    slos = {"": slo_of(SLO)}
    for text in args.slo:
        kind, _, bounds = text.rpartition(":")
        slos[kind] = slo_of(bounds)
    trace = _trace(args)
    if unknown := set(slos) - {"", *(asked.kind for asked in trace)}:
        raise UsageError(f"--slo: the trace has no requests of kind {', '.join(sorted(unknown))}")
    if args.write:
        form.write(trace, args.write)
        return 0
    pictures: dict[str, int] = {}
    if args.sim:
        samples, server = _simulated(args, trace), args.sim
    else:
        server = args.url
        target = target_of(args, args.url)
        samples, pictures = uvloop.run(replay.against(target, args.trace, trace, args.seed))
    p50, p99, most = replay.lateness_ms(trace, samples)
    rows = replay.rows(args.trace, server, trace, samples, slos)
    found = {
        "requests": len(trace),
        "seconds": trace[-1].arrival_s,
        "late_ms": {"p50": p50, "p99": p99, "most": most},
        "pictures": pictures,
        "rows": rows,
    }
    text = json.dumps(found, indent=2)
    if args.save:
        args.save.write_text(text + "\n")
    late = f"sent {p50:.1f} ms late at p50, {p99:.1f} at p99, {most:.1f} at most"
    seen = "".join(f"; pictures {what} {count}" for what, count in pictures.items())
    print(text if args.json else f"{figures.table(rows)}\n{len(trace)} requests, {late}{seen}")
    return 1 if any(row["errors"] for row in rows) else 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    """Raises UsageError."""
    from epd_lab.bench.traces import form, published, shapes

    path = Path(args.trace)
    try:
        if path.exists():
            found = published.read(path, math.inf if args.rate else args.seconds or math.inf)
            if args.rate:
                found = form.at_rate(found, args.rate)
                found = [a for a in found if a.arrival_s < (args.seconds or math.inf)]
        else:
            found = shapes.drawn(args.trace, args.rate or PER_S, args.seconds or FOR_S, args.seed)
    except (ValueError, OSError) as error:
        raise UsageError(f"{args.trace}: {error}") from None
    kinds = sorted({asked.kind for asked in found})
    found = [asked for asked in found if args.only in {None, asked.kind}]
    if kinds and not found:
        raise UsageError(f"--only {args.only}: there are {', '.join(kinds)}")
    if not found:
        raise UsageError(f"{args.trace}: there is no request in it; give more --seconds")
    return found


def _simulated(args: argparse.Namespace, trace: list[TraceRequest]) -> Any:
    from epd.topology import parse_topology
    from epd_lab.bench.workload import Workload
    from epd_lab.plan import costs, limits, traced
    from epd_lab.plan.run import ForecastPlan

    parse_topology(args.sim)
    known = costs.read(args.costs or costs.BUNDLED)
    vars(args)["engine.device"] = "cuda"
    settings, nothing = options.settings_of(args), Workload("trace", ())
    if settings.model_dir:
        limits.check_model(known, settings.model_dir, settings)
    list(limits.requests_of(known, nothing, trace))  # raises where costs end
    plan = ForecastPlan(known, args.sim, nothing, settings)
    return traced.forecast(plan, trace, args.parts)
