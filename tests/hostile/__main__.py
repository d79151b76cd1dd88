"""`python -m tests.hostile VERB`: what is too long for any suite, against real processes.

Each prints one JSON object a line, and ends with status 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from tests.hostile.live import KINDS, besiege


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    inputs = verbs.add_parser("inputs", help="what generators make, beside an innocent client")
    inputs.add_argument("kinds", nargs="*", choices=[[], *KINDS], help=", ".join(KINDS))
    inputs.add_argument("--count", type=int, default=200, help="of each kind; default 200")
    inputs.add_argument("--seed", type=int, default=1, help="default 1")
    args = parser.parse_args()
    names = args.kinds or KINDS
    sieges = besiege({name: KINDS[name] for name in names}, args.seed, args.count)
    faults = list(itertools.chain.from_iterable(siege.faults for siege in sieges))
    for fault in faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
