"""`python -m tests.hostile VERB`: what is too long for any suite, against real processes.

Each prints one JSON object a line, and ends with status 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

from tests.hostile.kills import soak
from tests.hostile.live import KINDS, besiege


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    kills = verbs.add_parser("kills", help="kill -9 and SIGSTOP of one instance after another")
    kills.add_argument("topology", help="such as 2e2p2d")
    kills.add_argument("--minutes", type=float, default=8.0, help="default 8")
    inputs = verbs.add_parser("inputs", help="what generators make, beside an innocent client")
    inputs.add_argument("kinds", nargs="*", choices=[[], *KINDS], help=", ".join(KINDS))
    inputs.add_argument("--count", type=int, default=200, help="of each kind; default 200")
    for verb in (kills, inputs):
        verb.add_argument("--seed", type=int, default=1, help="default 1")
    args = parser.parse_args()
    if args.verb == "kills":
        found = soak(args.topology, args.minutes, args.seed)
        print(json.dumps(found.report()))
        faults = found.faults
    else:
        names = args.kinds or KINDS
        sieges = besiege({name: KINDS[name] for name in names}, args.seed, args.count)
        faults = list(itertools.chain.from_iterable(siege.faults for siege in sieges))
    for fault in faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
