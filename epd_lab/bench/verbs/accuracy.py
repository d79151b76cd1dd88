"""The arguments of `epd bench accuracy`, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from epd.cli.configure import options
from epd.cli.parser import UsageError

DESCRIPTION = """\
Ask a server the questions of FILE, greedily, and count the right answers; of several servers also
the pairs of answers that differ, and McNemar's p: how likely so unequal numbers are of servers that
are equally good. A SERVER is an URL, or a topology that is started with the flags of epd run below.

FILE has JSON lines, or is one JSON array, of OCRBench ({"image_path", "question", "answers"}; paths
are relative to FILE) or of GSM8K ({"question", "answer"}, whose number is behind ####). OCRBench's
script is the rule of the first, lm-eval's flexible-extract of the second, which is asked without
examples. A server with keys gets EPD_API_KEY.
Exit status 1 if a server differs from the first with a p below 0.05, or if one fails.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("accuracy", help="right answers", description=DESCRIPTION)
    parser.add_argument("file", type=Path, metavar="FILE", help="questions and answers")
    parser.add_argument("servers", nargs="+", metavar="SERVER", help="URL or topology")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="of an answer, default 256"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.servers import accuracy
    from epd_lab.bench.verbs.serve import target_of

    for name in ("concurrency", "max_tokens"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    targets = [target_of(args, text) for text in args.servers]
    return accuracy.run(targets, args.file, args.concurrency, args.max_tokens, as_json=args.json)
