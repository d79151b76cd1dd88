"""The arguments of `epd bench serve`, and what they become."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file

if TYPE_CHECKING:
    from epd_lab.bench.servers.serve import Target
    from epd_lab.bench.workload import Workload

SLO = "ttft=1000,tpot=30"
DESCRIPTION = """\
Load one OpenAI server, or compare several, with streamed chat completions. A SERVER is an URL, or a
topology such as 1e1pd, which is started for it with the flags of epd run below. Figures are medians
of the repeats: requests and tokens per second, goodput (requests per second that keep --slo), time
to first token, between chunks (ITL), per later token (TPOT), end to end, in milliseconds; lag is
how late the client itself is, which is in its other times, too. JSON has all percentiles and, of
epd's servers, the time in each state of each stage.
Of several servers each is divided by the first. A server that wants a key gets EPD_API_KEY.

workloads (text tokens in / out, images; unique noise, so that nothing is compressible or cached):
  text      1024/256, 64 users            3x560     400/128, three of 560x560, 32 users
  3x560-c1  the same, one user            1x1080p   64/64, one of 1920x1080, 32 users
  text-c1   text, one user
  4x1080p   1024/64, four, 16 users       mixed     16 people chat, bursts of 8 x four 1080p
  reuse-0 -20 -50 -90  3x560 with that percentage of images sent before
  pages     16/1024, a page of words of 2480x3508, 64 users
  small     64/24, one of 112x112, 4 users: for the bundled model
  NAME@30   one of these, 30 arrivals a second instead of users (of its first stream)
  FILE      one chat-completions body per line
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("serve", help="OpenAI servers under load", description=DESCRIPTION)
    parser.add_argument("servers", nargs="+", metavar="SERVER", help="URL or topology")
    parser.add_argument(
        "--workload", dest="workloads", action="append", metavar="NAME",
        help="may be repeated; default small",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=int, metavar="N", help="another number of users")
    parser.add_argument(
        "--rate", type=float, metavar="PER_S", help="an open loop instead: Poisson arrivals"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="another number of requests")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--slo", default=SLO, metavar="MS",
        help=f"for goodput, in ms, default {SLO}; itl: of 99 of 100 gaps of an answer",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write the JSON there, too")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw it, too (SVG)")
    parser.add_argument(
        "--trace", type=new_file, metavar="FILE",
        help="every request's way through the stages, to be opened in https://ui.perfetto.dev",
    )  # fmt: skip
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.servers import serve

    plan = serve.ServePlan(
        tuple(target_of(args, text) for text in args.servers),
        tuple(_workload(args, name) for name in args.workloads or ["small"]),
        args.repeats,
        slo_of(args.slo),
        args.trace,
    )
    return serve.run(plan, as_json=args.json, save=args.save, plot=args.plot)


def target_of(args: argparse.Namespace, text: str) -> Target:
    from epd_lab.bench.servers.serve import Target

    if text.startswith(("http://", "https://")):
        return Target(text, url=text)
    from epd.cli.start.plan import StartPlan, plan_topology
    from epd.cli.start.ports import settle_port
    from epd.topology import parse_groups

    parse_groups(text)  # before anything is measured
    settings = options.settings_of(args)
    placing, log = options.placing_of(args), options.log_of(args, "warning")

    def cluster() -> StartPlan:
        return plan_topology(text, settle_port(settings, wanted=args.port), placing, log)

    return Target(text, cluster=cluster)


def _workload(args: argparse.Namespace, name: str) -> Workload:
    from epd_lab.bench.workload import Arrival, Closed, Poisson, changed, named

    if args.rate is not None and args.concurrency is not None:
        raise UsageError("--rate is an open loop and --concurrency a closed one; give one of them")
    arrival: Arrival | None = None
    for flag, value in (("--rate", args.rate), ("--concurrency", args.concurrency)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} {value}: a number above 0 is needed")
    if args.requests is not None and args.requests < 1:
        raise UsageError(f"--requests {args.requests}: send at least one")
    if args.rate is not None:
        arrival = Poisson(args.rate)
    elif args.concurrency is not None:
        arrival = Closed(args.concurrency)
    try:
        return changed(named(name), arrival, args.requests)
    except ValueError as error:
        raise UsageError(f"--workload: {error}") from None


def slo_of(text: str) -> Any:
    """`ttft=1s,itl=50ms`; a bare number has milliseconds.  What is not named is not bounded."""
    from epd_lab.bench.servers.figures import Slo

    bounds = dict.fromkeys(("ttft_s", "tpot_s", "itl_s"), math.inf)
    try:
        for part in text.split(","):
            name, value = part.split("=")
            number = value.removesuffix("ms").removesuffix("s")
            bounds[f"{name}_s"] = float(number) / (1 if value == f"{number}s" else 1e3)
            if not 0 < bounds[f"{name}_s"] < math.inf:
                raise ValueError
        return Slo(**bounds)
    except (ValueError, TypeError):
        raise UsageError(f"--slo {text!r}: write {SLO}, in milliseconds; or itl=30ms") from None
