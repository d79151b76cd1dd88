"""The arguments of `epd bench calibrate`, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from epd.cli.configure import options
from epd.cli.parser import UsageError, new_file
from epd_lab.bench.costs.shape import SIZES
from epd_lab.bench.verbs.gpu import with_model

DESCRIPTION = """\
Measure a card for `epd plan`, in a minute behind the load of the model: steps by tokens, decodes,
contexts and pairs of prompt tokens, the tower by patches, decoding of images, and with two devices
the hop between them. Writes a cost file, and prints how far its costs are off from steps that no
cost was made of. Without --model it measures the shape of Qwen3-VL-4B, or another --shape, with
random weights, as speed depends on shapes and not on values.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("calibrate", help="a card, for epd plan", description=DESCRIPTION)
    parser.add_argument("--shape", choices=SIZES, default="4b", help="without --model; default 4b")
    parser.add_argument(
        "--out",
        type=new_file,
        default=Path("costs.json"),
        metavar="FILE",
        help="default costs.json",
    )
    parser.add_argument(
        "--budget-s", type=float, default=60.0, metavar="S",
        help="default 60; what is left out for time is noted in the file",
    )  # fmt: skip
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, ModelError and UsageError."""
    from epd.cli.configure.hub import find_model
    from epd.cli.scratch import scratch
    from epd_lab.bench.costs import calibration
    from epd_lab.plan.costs import write

    if args.budget_s <= 0:
        raise UsageError(f"--budget-s {args.budget_s:g}: a number above 0 is needed")
    with scratch("epd-calibrate-") as place:
        with_model(args, place)
        settings = options.settings_of(args)
        weights = settings.engine.load_format != "dummy"
        directory = find_model(settings.model_dir, weights=weights)
        settings = msgspec.structs.replace(settings, model_dir=str(directory))
        found = calibration.measured(settings, args.budget_s)
    write(found, args.out)
    print(f"{args.out}: {found.model.name} on {found.device}", *found.sources, sep="\n")
    print("decodes  context   prompt  history  measured ms  error")
    for one in found.checks:
        counts = f"{one.decodes:7}{one.context:9}{one.prompt:9}{one.history:9}"
        print(f"{counts}{one.measured_ms:13.2f}{found.error(one):+7.0%}")
    return 0
