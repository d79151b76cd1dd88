"""`python -m tests.hostile VERB`: what is too long for any suite, against real processes.

kills TOPOLOGY   `kill -9` and SIGSTOP of one instance after another, under load
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.hostile.kills import soak


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    kills = verbs.add_parser("kills", help="kill and stop instances under load")
    kills.add_argument("topology", help="such as 2e2p2d")
    kills.add_argument("--minutes", type=float, default=8.0, help="default 8")
    kills.add_argument("--seed", type=int, default=1, help="of questions and faults")
    args = parser.parse_args()
    found = soak(args.topology, args.minutes, args.seed)
    print(json.dumps(found.report()))
    for fault in found.faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
