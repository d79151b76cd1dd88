"""The arguments of `epd bench gpu`, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli import options
from epd.cli.parser import UsageError
from epd_lab.bench.shape import SERVED
from epd_lab.bench.verb_serve import slo_of, target_of

if TYPE_CHECKING:
    from epd_lab.bench.roofline import Roofline

DESCRIPTION = """\
What the GPUs of this host do, unattended: topologies of one, two or four GPUs under the workloads
of `epd bench serve`, each compared with the first, which are replicas. One table at the end;
gpu.json, gpu.md and gpu.svg are written after each topology. Without --model it measures the shape
of Qwen3-VL-4B, or another --shape, with random weights. Some minutes per topology and repeat.

Answers are greedy; those of a mixture of experts with random weights are drawn (temperature 1), or
all would choose the same few experts.
"""


def add_to(kinds: Any) -> None:
    """Add the parser; `kinds` is argparse's action of subparsers."""
    parser = kinds.add_parser("gpu", help="the GPUs of this host", description=DESCRIPTION)
    parser.add_argument("--gpus", type=int, metavar="N", help="1, 2 or 4; default: as many as here")
    parser.add_argument(
        "--topology", dest="topologies", action="append", metavar="NAME",
        help="instead of those of the suite; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--workload", dest="workloads", action="append", metavar="NAME",
        help="instead of those of the suite; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--shape",
        choices=SERVED,
        default="4b",
        help="without --model; default 4b",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="of each stream, at most; default: all"
    )
    parser.add_argument(
        "--times", type=int, default=1, metavar="N",
        help="send so many times the requests of each stream, all new: of a longer run its "
        "beginning and its end are a smaller part",
    )  # fmt: skip
    parser.add_argument("--slo", default="ttft=1000,tpot=30", metavar="MS", help="of goodput")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-gpu"), metavar="DIR", help="default bench-gpu"
    )
    parser.add_argument(
        "--costs", type=Path, metavar="FILE",
        help="also time steps, towers and images alone, and write them there for epd sim plan",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd import tiny
    from epd_lab.bench import gpu, shape
    from epd_lab.bench.machine import gpus
    from epd_lab.bench.serve import Plan
    from epd_lab.bench.workload import at_most, drawn, lengthened, named

    here = len(gpus())
    number = args.gpus or max((n for n in gpu.SUITES if n <= here), default=0)
    given = vars(args)
    device = given.get("engine.device")
    if number not in gpu.SUITES or (number > here and not device):
        raise UsageError(
            f"--gpus {number}: this host has {here} NVIDIA GPUs, and there are suites for "
            f"{', '.join(map(str, gpu.SUITES))}; without a GPU, `epd bench serve 1e1p1d` measures "
            "the bundled model on the CPU"
        )
    if not device:
        given["engine.device"] = ",".join(f"cuda:{index}" for index in range(number))
    if not given.get("model_dir"):
        family = "" if args.shape.startswith("qwen") else "qwen3-vl-"
        name = f"{family}{args.shape}-shape"
        directory = shape.write(args.out.absolute() / name, tiny.CHECKPOINT, args.shape)
        given |= {"model_dir": str(directory), "engine.load_format": "dummy"}
    topologies, workloads = gpu.SUITES[number]
    for flag, count in (("--requests", args.requests), ("--times", args.times)):
        if count is not None and count < 1:
            raise UsageError(f"{flag} {count}: at least 1 is needed")
    try:
        chosen = tuple(lengthened(named(name), args.times) for name in args.workloads or workloads)
    except ValueError as error:
        raise UsageError(f"--workload: {error}") from None
    if args.requests is not None:
        chosen = tuple(at_most(workload, args.requests) for workload in chosen)
    if given.get("engine.load_format") == "dummy" and shape.is_mixture(Path(given["model_dir"])):
        # Of random weights greedy answers are the same token, and so are the experts they choose.
        chosen = tuple(map(drawn, chosen))
    plan = Plan(
        tuple(target_of(args, name) for name in args.topologies or topologies),
        chosen,
        args.repeats,
        slo_of(args.slo),
    )
    roofline = _roofline(args, gpus()) if number == 1 else None
    status = gpu.run(plan, args.out, roofline, as_json=args.json)
    if args.costs is not None:
        from epd_lab.bench import step_costs
        from epd_lab.plan.costs import write

        write(step_costs.measured(options.settings_of(args)), args.costs)
    return status


def _roofline(args: argparse.Namespace, names: list[str]) -> Roofline | None:
    """Of the model on the one GPU, where both are known."""
    from epd.engine.checkpoint import read_config, read_preprocessor
    from epd_lab.bench.roofline import Roofline, card_of

    given = vars(args)
    card, directory = card_of(names), Path(given["model_dir"])
    if card is None or not directory.is_dir():
        return None
    config, preprocessor = read_config(directory), read_preprocessor(directory)
    fp8 = (given.get(f"engine.{name}") == "fp8" for name in ("quantization", "kv_cache_dtype"))
    return Roofline(card, config, preprocessor, *fp8)
