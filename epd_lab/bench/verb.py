"""`epd bench`: measure, never test."""

from __future__ import annotations

import argparse

from epd.cli.configure.options import size
from epd_lab.bench.verbs import (
    accuracy,
    calibrate,
    chaos,
    formats,
    gpu,
    peer,
    probe,
    serve,
    trace,
    truth,
)

DESCRIPTION = """
Measure a part of epd on this machine and print a table. Both sides of every comparison run in one
process run, and figures are medians of several repeats; say the hardware beside every number.
`epd bench WHAT --help` tells more of each.
"""

EXAMPLES = (
    ("epd bench gateway", "about a minute on two cores"),
    ("epd bench gateway --json --repeats 5", "for programs"),
    ("epd bench hop --max-nbytes 16MiB", "two minutes; --json for programs"),
    ("epd bench hop --device cuda", "between two GPUs; a minute"),
    ("epd bench soak shm", "a minute; other transports take up to five"),
    ("epd bench sim", "some minutes; --hours 1 for a part of the day"),
    ("epd bench trace reuse-50 --url 1e1p1d", "images that repeat; a minute"),
    ("epd bench chaos --partition", "kills, stops and cuts under load; 15 minutes"),
    ("epd bench trace mixed --rate 2 --url URL", "chat beside bursts, open loop; a minute"),
    ("epd bench serve 1e1pd 2epd --workload small", "two topologies of the bundled model"),
    ("epd bench peer a=URL b=URL --save peer.json", "servers on one card, each loaded alone"),
    ("epd bench accuracy questions.jsonl 1epd 1e1p1d", "right answers of two topologies"),
    ("epd bench probe --device cuda", "models of true size, by few of their layers; minutes"),
    ("epd bench formats --device cuda --only 8b", "weights in 16, 8 and 4 bits; three minutes"),
    ("epd bench truth", "right answers under faults; two minutes"),
    ("epd bench calibrate --device cuda", "a card's costs, for epd plan; a minute"),
    ("epd bench gpu", "the GPUs of this host, unattended; about ten minutes per topology"),
)

ALONE = {  # verbs that have a module of their own
    "accuracy": accuracy, "calibrate": calibrate, "chaos": chaos, "formats": formats, "gpu": gpu,
    "peer": peer, "probe": probe, "serve": serve, "trace": trace, "truth": truth,
}  # fmt: skip

GATEWAY = """the gateway, the bus and the roles with engines that make tokens without a model,
against an echo by the same HTTP server: requests and streamed tokens per second, added latency,
and the state machines' share of the CPU time"""
HOP = """rows from one process to another, by every transport and size, against a memcpy, mooncake
driven bare, and safetensors files on disk and in /dev/shm: latency from ready at the sender to
usable at the receiver, throughput, CPU seconds per GB"""
SOAK = """thousands of items through one transport between two processes, either of which is killed
or frozen at random: no wrong byte, no byte in a free slot, every item delivered, nothing left;
with --kills 0, whether memory grows"""
SIM = """the simulator on one core: steps of its loop and whole runs of 24 requests per second, and
how long a day of virtual time takes at one request per second"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    gateway = kinds.add_parser("gateway", help="the gateway without a model", description=GATEWAY)
    _add_repeats(gateway)
    hop = kinds.add_parser("hop", help="rows between processes", description=HOP)
    hop.add_argument(
        "--max-nbytes", type=size, default=64 << 20, metavar="SIZE",
        help="leave out items above it, default 64MiB; up to 256MiB",
    )  # fmt: skip
    hop.add_argument(
        "--out", default="", metavar="DIR", help="also write hop.json, hop.md and hop.svg there"
    )
    hop.add_argument("--json", action="store_true", help="print one JSON object")
    hop.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="cuda: rows and KV between the first two GPUs, over cuda and, if it is there, nixl",
    )  # fmt: skip
    soak = kinds.add_parser("soak", help="a transport under kills", description=SOAK)
    soak.add_argument("transport", help="such as shm; epd doctor names them")
    soak.add_argument("--items", type=int, default=10_000, metavar="N", help="default 10000")
    soak.add_argument("--kills", type=int, default=60, metavar="N", help="or freezes; default 60")
    soak.add_argument(
        "--pool", type=size, default=24 << 20, metavar="SIZE", help="of the owner, default 24MiB"
    )
    soak.add_argument("--seed", type=int, default=1, metavar="N", help="of sizes and kills")
    soak.add_argument("--json", action="store_true", help="print one JSON object")
    sim = kinds.add_parser("sim", help="the simulator", description=SIM)
    _add_repeats(sim)
    sim.add_argument("--hours", type=int, default=24, metavar="N", help="of the day; default 24")
    serve.add_to(kinds)
    peer.add_to(kinds)
    accuracy.add_to(kinds)
    gpu.add_to(kinds)
    calibrate.add_to(kinds)
    probe.add_to(kinds)
    formats.add_to(kinds)
    chaos.add_to(kinds)
    trace.add_to(kinds)
    truth.add_to(kinds)


def _add_repeats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from epd.cli.parser import UsageError

    if getattr(args, "repeats", 1) < 1:
        raise UsageError(f"--repeats {args.repeats}: measure at least once")
    if (alone := ALONE.get(args.what)) is not None:
        return int(alone.run(args))
    if args.what == "sim":
        from epd_lab.sim.campaigns.bench import run_bench

        if not 1 <= args.hours <= 24:
            raise UsageError(f"--hours {args.hours}: a day has 1 to 24")
        return run_bench(args.repeats, args.hours, as_json=args.json)
    if args.what == "soak":
        from epd.transport.backends import BACKENDS
        from epd_lab.bench.transports import soak

        if not 0 <= args.kills <= args.items:
            raise UsageError(f"--kills {args.kills}: between 0 and the number of items")
        slots = args.pool // soak.SLOT_NBYTES
        if slots < soak.IN_FLIGHT:
            raise UsageError(f"--pool {args.pool}: at least {soak.IN_FLIGHT * soak.SLOT_NBYTES}")
        if args.transport not in BACKENDS:
            raise UsageError(f"{args.transport!r}: choose {', '.join(BACKENDS)}")
        soak_plan = soak.SoakPlan(
            args.transport, args.items, args.kills, slots=slots, seed=args.seed
        )
        return soak.run(soak_plan, as_json=args.json)
    if args.what == "hop":
        if args.device == "cuda":
            from epd_lab.bench.transports import hop_device

            return hop_device.run(as_json=args.json)
        from epd_lab.bench.transports import hop

        if args.max_nbytes < hop.SIZES[0]:
            raise UsageError(f"--max-nbytes {args.max_nbytes}: the smallest item has 65536 bytes")
        plan = hop.HopPlan(max_nbytes=args.max_nbytes)
        return hop.run(plan, as_json=args.json, out=args.out)
    from epd_lab.bench.gateway.gateway import GatewayPlan
    from epd_lab.bench.gateway.gateway import run as run_gateway

    return run_gateway(GatewayPlan(repeats=args.repeats), as_json=args.json)
