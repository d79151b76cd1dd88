"""The arguments of `epd bench probe`, and what they become."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd_lab.bench.machine import gpus

DESCRIPTION = """\
What a model takes that a card does not hold, by its first layers with random weights: memory of
weights, KV and workspace, and times of the tower with an image of 1920x1080, of prompts of 2,048
and 8,192 tokens, and of steps of 1, 32 and 128 decodes with 2,048 tokens behind each. Each model is
probed with two numbers of layers; a line through both is the whole, and says on how many cards it
fits. Without --model: Qwen3-VL-8B, -32B (fp8), -30B-A3B and -235B-A22B, Qwen3.6-35B-A3B and
Kimi-K2.5, of their sizes alone. Half a minute for each on a GPU.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("probe", help="true sizes, by few layers", description=DESCRIPTION)
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="without --model: those with this in their name",
    )
    parser.add_argument(
        "--layers", type=int, nargs=2, metavar="N", help="two numbers of layers; with --model"
    )
    parser.add_argument(
        "--limit-s", type=float, default=120.0, metavar="S",
        help="for a model and a number of layers, default 120; what takes longer is left out",
    )  # fmt: skip
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write JSON there")
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench.costs import probe, probe_table

    if args.save is not None and not args.save.parent.is_dir():
        raise UsageError(f"--save {args.save}: {args.save.parent} is no directory")
    settings = options.settings_of(args)
    probes = _probes(args, probe.PROBES, settings.model_dir)
    report: dict[str, Any] = {
        "card": next(iter(gpus()), "no GPU") if settings.engine.device != "cpu" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "dtype": settings.engine.dtype,
        "share": settings.engine.gpu_memory_utilization,
        "rows": [],
    }
    for row in probe.run(probes, settings, args.limit_s):
        report["rows"].append(row)
        print(probe_table.line(row), flush=True)
        if args.save is not None:
            args.save.write_text(probe_table.as_json(report))
    print("\n" + probe_table.table(report))
    return 0 if all("failed" not in row for row in report["rows"]) else 1


def _probes(args: argparse.Namespace, known: Sequence[Any], model: str) -> list[Any]:
    """Raises UsageError and ModelError."""
    if bool(model) != bool(args.layers):
        raise UsageError("--model and --layers go together: which model, by which of its layers")
    if model:
        from epd.cli.configure.hub import find_model
        from epd_lab.bench.costs.probe import Probe

        if not 1 <= args.layers[0] < args.layers[1]:
            raise UsageError(f"--layers {args.layers[0]} {args.layers[1]}: give rising numbers")
        given = vars(args).get("engine.quantization") or ""
        directory = find_model(model, weights=False)
        return [Probe(directory.name, tuple(args.layers), "", directory, given)]
    texts = [text.lower() for text in args.only or [""]]
    found = [one for one in known if any(text in one.name.lower() for text in texts)]
    if not found:
        raise UsageError(f"--only: none of {', '.join(one.name for one in known)} has that")
    return found
