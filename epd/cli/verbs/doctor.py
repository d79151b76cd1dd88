"""`epd doctor`: what is installed, reachable, missing, left over; and the fix."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from epd.cli.configure import options

DESCRIPTION = """
Look at everything that epd needs on this host, and say of each thing that is wrong how to fix it.
Changes nothing, unless --fix is given: it removes what dead processes left behind.

--json prints {"ok", "checks": [{"name", "ok", "detail", "remedy"}]}. Exit status 1 if any check
failed.
"""

EXAMPLES = (
    ("epd doctor", "the state of this host"),
    ("epd doctor --model ~/Qwen3-VL-4B --port 9000", "could this model be served on this port?"),
    ("epd doctor --json | jq '.checks[] | select(.ok | not)'", "for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="MODEL", help="check this checkpoint too")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="default 8000")
    options.add_cacert_flag(parser)
    parser.add_argument("--run-dir", default="", metavar="DIR", help="as in epd run")
    parser.add_argument("--fix", action="store_true", help="remove leftovers of dead processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from epd.cli.look.doctor import examine
    from epd.errors import FAILED, OK

    checks = examine(args.model, args.host, args.port, args.run_dir, args.cacert, fix=args.fix)
    ok = all(check.ok for check in checks)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}))
        return OK if ok else FAILED
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<15} {check.detail}")
        if check.remedy:
            print(f"      {'':<15} -> {check.remedy}")
    print("all is well" if ok else "something is wrong: see FAIL")
    return OK if ok else FAILED
