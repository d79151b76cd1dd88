"""`epd verify`: one command that proves a checkpoint, or names what is wrong."""

from __future__ import annotations

import argparse

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd.cli.verify.rows import ROWS

_TABLE = "\n".join(f"  {row.name:13} {row.proves}" for row in ROWS)
DESCRIPTION = f"""
Compare this engine with transformers on a checkpoint, from its files to the answers of a process
for each stage, and print a row for each thing that is proved:

{_TABLE}

Differences are in spreads (standard deviations) of the right numbers. What rounding explains is
measured: transformers against itself in twice the bits (float64, or float32 for 16 bits). Four
times as far is still the same, and answers may part where two tokens are as likely. In 16 bits a
model with experts may differ in fewer than half of the prompts, which are named.
Both sides are in memory at once: what they need is estimated first, and a model that does not fit
is compared by its first layers (--layers), both sides cut alike.

Exit status 1 if a row differs or could not be compared. --json FILE is for an issue: it has the
rows and versions, and holds no weights.
"""

EXAMPLES = (
    ("epd verify Qwen/Qwen2.5-VL-3B-Instruct", "one from the Hugging Face cache"),
    ("epd verify ~/Qwen3-VL-32B --layers 4 --json report.json", "by its first layers"),
    ("epd verify ~/converted --against ~/original", "what has changed in a copy"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, or ORG/NAME of the hub's cache")
    parser.add_argument(
        "--against", default="transformers", metavar="WHAT",
        help="transformers, with the same files (default); or a directory: transformers with the "
        "files of that one, of which MODEL is a copy or a conversion",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, metavar="N", help="compare the first N layers of the language model"
    )
    parser.add_argument("--device", dest="engine.device", metavar="DEVICE", help="cpu or cuda:N")
    parser.add_argument(
        "--dtype", dest="engine.dtype", metavar="DTYPE",
        help="float32, bfloat16 or float16; default float32, which shows most",
    )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the report there, too")
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.verify.report import verify

    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers {args.layers}: compare at least one")
    return verify(args)
