"""The arguments of `epd bench chaos`, and what they become."""

from __future__ import annotations

import argparse
from typing import Any

from epd.cli.parser import UsageError, new_file

CHAOS = """\
Faults of real processes under load. A cluster is started and answers each question while nothing
fails: texts, one to four images, films; greedy and seeded, with penalties, grammars, two choices
and tools. Then clients ask these questions on and on, streamed and whole, some leave in the middle,
and faults come: kill -9 of any rank every --kill-every seconds, and between two kills a SIGSTOP, a
full disk (no file can grow) or a limit of open files, each for --stop seconds. With --partition the
instances are shared between two made hosts (namespaces of this kernel; root), whose cable is cut in
both ways or one way. With --gateways 2 there are kills of gateways, too, whose clients ask the
other one again under the same Idempotency-Key. A fault waits while it would take the last instance
of a stage that has more.

Every answer is compared. The verdict is one JSON object; the exit status is 1 when an answer is
wrong, a request failed though each stage had an instance (and it met less than four losses; of
422, poison: less than two), a stream paused then for longer than --max-pause for each loss in its
pause, or anything is still in use or left behind at the end. The plan of faults is a function of
--seed, and printed first; `replay` has the requests of wrong answers.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser(
        "chaos", help="kills, stops, partitions under load", description=CHAOS
    )
    parser.add_argument("--topology", default="2e2p2d", metavar="NAME", help="default 2e2p2d")
    parser.add_argument("--minutes", type=float, default=15.0, metavar="N", help="default 15")
    parser.add_argument(
        "--kill-every", type=float, default=10.0, metavar="SECONDS", help="default 10"
    )
    parser.add_argument(
        "--stop", default="3..20", metavar="LOW..HIGH", help="seconds of what is no kill; 3..20"
    )
    parser.add_argument(
        "--partition", action="store_true", help="two hosts, and cuts of their cable"
    )
    parser.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="that all instances join; default 1"
    )
    parser.add_argument("--clients", type=int, default=6, metavar="N", help="at a time; default 6")
    parser.add_argument(
        "--max-pause", type=float, default=6.0, metavar="SECONDS", help="of a stream; default 6"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of faults and questions")
    parser.add_argument("--plan", action="store_true", help="print the plan of faults and end")
    parser.add_argument("--json", action="store_true", help="with requests of wrong answers")
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write the JSON there")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="SVG of rate, pauses, faults")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of epd run, behind --")


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.chaos.plan import faults_of
    from epd_lab.bench.chaos.run import chaos, report, settled

    wish, skipped = settled(_wish(args))
    for line in (*skipped, *map(str, faults_of(wish))):
        print(line, flush=True)
    if args.plan:
        return 0
    return report(chaos(wish), as_json=args.json, save=args.save, plot=args.plot)


def _wish(args: argparse.Namespace) -> Any:
    """Raises UsageError."""
    from epd_lab.bench.chaos.plan import Wish

    try:
        low, _, high = args.stop.partition("..")
        stop_s = float(low), float(high)
    except ValueError:
        raise UsageError(f"--stop {args.stop}: two numbers of seconds, such as 3..20") from None
    if not 0 < stop_s[0] <= stop_s[1]:
        raise UsageError(f"--stop {args.stop}: above 0, the smaller number first")
    if min(args.minutes, args.kill_every, args.clients, args.max_pause) <= 0:
        raise UsageError("--minutes, --kill-every, --clients and --max-pause: above 0")
    if args.gateways < 1 or (args.gateways > 1 and args.partition):
        raise UsageError("--gateways: at least 1, and several without --partition")
    return Wish(
        args.topology, args.minutes, args.kill_every, stop_s, args.partition, args.seed,
        args.clients, args.max_pause, args.gateways, tuple(args.flags),
    )  # fmt: skip
