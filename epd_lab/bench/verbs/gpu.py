"""The arguments of `epd bench gpu`, and what they become."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.cli.configure import options
from epd.cli.parser import UsageError
from epd_lab.bench.costs.shape import SIZES
from epd_lab.bench.verbs.serve import SLO, slo_of, target_of

if TYPE_CHECKING:
    from epd_lab.bench.costs.roofline import Roofline
    from epd_lab.bench.servers.serve import Target

DESCRIPTION = """\
What the GPUs of this host do, unattended: topologies of one, two or four GPUs under the workloads
of `epd bench serve`, each compared with the first, which are replicas. One table at the end;
gpu.json, gpu.md and gpu.svg are written after each workload. Without --model it measures the shape
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
    parser.add_argument("--shape", choices=SIZES, default="4b", help="without --model; default 4b")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="of each stream, at most; default: all"
    )
    parser.add_argument(
        "--users", type=int, metavar="N",
        help="so many times the users of each stream, and so many times its requests; default: 1, "
        "with four GPUs 2, so that a GPU has as many as one of two",
    )  # fmt: skip
    parser.add_argument(
        "--times", type=int, default=1, metavar="N",
        help="send so many times the requests of each stream, all new: of a longer run its "
        "beginning and its end are a smaller part",
    )  # fmt: skip
    parser.add_argument("--slo", default=SLO, metavar="MS", help="of goodput, as epd bench serve")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-gpu"), metavar="DIR", help="default bench-gpu"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd_lab.bench import gpu
    from epd_lab.bench.costs import shape
    from epd_lab.bench.machine import gpus
    from epd_lab.bench.servers.serve import ServePlan
    from epd_lab.bench.workload import at_most, chosen, drawn, users_of

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
    with_model(args, args.out.absolute())
    topologies, workloads = gpu.SUITES[number]
    for flag in ("requests", "users", "times"):
        count = given[flag]
        if count is not None and count < 1:
            raise UsageError(f"--{flag} {count}: at least 1 is needed")
    users = users_of(number) if args.users is None else args.users
    try:
        sent = chosen(args.workloads or workloads, users=users, times=args.times)
    except ValueError as error:
        raise UsageError(f"--workload: {error}") from None
    if args.requests is not None:
        sent = [at_most(workload, args.requests) for workload in sent]
    if given.get("engine.load_format") == "dummy" and shape.is_mixture(Path(given["model_dir"])):
        # Of random weights greedy answers are the same token, and so are the experts they choose.
        sent = list(map(drawn, sent))
    plan = ServePlan(
        tuple(target_of(args, name) for name in args.topologies or topologies),
        tuple(sent),
        args.repeats,
        slo_of(args.slo),
    )
    rooflines = _rooflines(args, gpus(), plan.targets)
    return gpu.run(plan, args.out, rooflines, as_json=args.json)


def with_model(args: argparse.Namespace, out: Path) -> None:
    """Without --model, --shape with random weights, whose directory is made in `out`."""
    from epd import tiny
    from epd_lab.bench.costs import shape

    given = vars(args)
    if not given.get("model_dir"):
        family = "" if args.shape.startswith("qwen") else "qwen3-vl-"
        directory = shape.write(out / f"{family}{args.shape}-shape", tiny.CHECKPOINT, args.shape)
        given |= {"model_dir": str(directory), "engine.load_format": "dummy"}


def _rooflines(
    args: argparse.Namespace, names: list[str], targets: Sequence[Target]
) -> dict[str, Roofline]:
    """Of the model on as many GPUs as each topology has, where card and shape have one; instances
    may share some, where fewer are named."""
    from epd.model_files.checkpoint import read_config, read_preprocessor
    from epd.topology import parse_groups
    from epd_lab.bench.costs.roofline import Roofline, card_of

    card, directory = card_of(names), Path(vars(args)["model_dir"])
    if card is None or not directory.is_dir():
        return {}
    engine = options.settings_of(args).engine
    config, preprocessor = read_config(directory), read_preprocessor(directory)
    one = Roofline(
        card, config, preprocessor,
        is_fp8=engine.quantization == "fp8",
        has_fp8_kv=engine.kv_cache_dtype == "fp8",
    )  # fmt: skip
    here = len(set(engine.device.split(",")))
    rooflines = {}
    for target in targets:
        if target.cluster is not None:
            groups = parse_groups(target.name, engine.tensor_parallel_size)
            num_cards = min(here, sum(ranks for _, ranks in groups))
            rooflines[target.name] = replace(one, num_cards=num_cards)
    return rooflines
