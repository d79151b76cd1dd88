"""The arguments of `epd bench formats`, and what they become."""

from __future__ import annotations

import argparse
import time
from typing import Any

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd_lab.bench.machine import gpus

DESCRIPTION = """\
Memory and speed of models of true size in each format of weights: bfloat16, eight bits (as they
are read, in blocks, of channels), integers of four bits, NVFP4 and MXFP4. Each is probed with two
numbers of layers and random weights; a line through both is the whole. Tokens per second of 1, 8
and 64 users with 2,048 tokens behind each are by the device's time. Models: Qwen3-VL-8B, -32B and
-30B-A3B, Qwen3.6-27B and -35B-A3B. Two to three minutes for each on a GPU.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("formats", help="formats of weights", description=DESCRIPTION)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="models with this in their name"
    )
    parser.add_argument(
        "--format", action="append", metavar="TEXT", dest="kinds", help="formats with this in it"
    )
    parser.add_argument(
        "--limit-s", type=float, default=60.0, metavar="S",
        help="for a format and a number of layers, default 60; what takes longer is left out",
    )  # fmt: skip
    parser.add_argument(
        "--device", dest="engine.device", default=argparse.SUPPRESS, metavar="DEVICE",
        help="cuda or cuda:1, where models are in bfloat16; default cpu",
    )  # fmt: skip
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write JSON there")
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.costs import formats, probe, probe_table

    if args.save is not None and not args.save.parent.is_dir():
        raise UsageError(f"--save {args.save}: {args.save.parent} is no directory")
    models = _chosen("--only", args.only, formats.MODELS)
    kinds = _chosen("--format", args.kinds, formats.FORMATS)
    settings = options.settings_of(args)
    report: dict[str, Any] = {
        "card": next(iter(gpus()), "no GPU") if settings.engine.device != "cpu" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "dtype": settings.engine.dtype,
        "context": probe.CONTEXT,
        "rows": [],
    }
    found = formats.probes(models, kinds)
    for row in probe.run(found, settings, args.limit_s, formats.TIMED):
        report["rows"].append(row)
        print(probe_table.line(row), flush=True)
        report["whole"] = list(formats.rows(report))
        if args.save is not None:
            args.save.write_text(probe_table.as_json(report))
    print("\n" + formats.table(report))
    return 0 if all("failed" not in row for row in report["rows"]) else 1


def _chosen(flag: str, texts: list[str] | None, known: dict[str, Any]) -> list[str]:
    """Raises UsageError."""
    found = [name for name in known if any(t.lower() in name.lower() for t in texts or [""])]
    if not found:
        raise UsageError(f"{flag}: none of {'; '.join(known)} has that")
    return found
