"""`epd verify`: one command that proves a checkpoint, or names what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

from epd.cli.configure import options
from epd.cli.parser import UsageError

DESCRIPTION = """
Compare this engine with transformers on a checkpoint, from its files to the answers of a process
for each stage, and print a row for each thing that is proved:

  tensors       every tensor of the files is read, or named
  config        all that config.json asks for is implemented, and means the same
  template      20 conversations (text, images, tools, system) become the same text
  tokenizer     their texts become the same tokens, and answers end at the same ones
  pictures      12 pictures of odd sizes become the same grids and patches
  placeholders  prompts with pictures become the same tokens
  weights       what is loaded is what transformers loads, bit for bit
  tower         the pictures become the same rows
  positions     tokens of prompts stand at the same places
  text, images  logits of 10 prompts each: maximum and mean difference, KL divergence
  answers       10 greedy answers of 64 tokens; where they part, both tokens and their margin
  processes     the same answers through 1e1p1d (1p1d for a model of text)

Differences are in spreads (standard deviations) of the right numbers. In float32 rounding explains
a thousandth of one; in 16 bits more: answers may part where two tokens are nearly as likely.
Both sides are in memory at once: what they need is estimated first, and a model that does not fit
is compared by its first layers (--layers), both sides cut alike.

Exit status 1 if a row differs or could not be compared. --json FILE is for an issue: it has the
rows and versions, and holds no weights.
"""

EXAMPLES = (
    ("epd verify Qwen/Qwen2.5-VL-3B-Instruct", "one from the Hugging Face cache"),
    ("epd verify ~/Qwen3-VL-32B --layers 4 --json report.json", "by its first layers"),
    ("epd verify ~/mine-fp8 --device cuda --dtype bfloat16 --against ~/mine", "a conversion"),
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.verify.report import verify

    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers {args.layers}: compare at least one")
    return verify(args)
