"""`python -m epd sim`: drills, swarm, exhaustive searches, mutants, replay.

`list` shows the coverage; `drill` and `swarm` search; `check` kills at every step; `model` searches
exhaustively.  `mutants` shows that drills notice bugs; `replay` runs one seed again and shows it.
Exit status 0: all passed; 1: something failed or a mutant survived; 2: usage; 130: stopped by
Ctrl-C, after a summary of what there was.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from epd_lab.sim.campaigns.models import check_models, model_names
from epd_lab.sim.cli import hunt, search
from epd_lab.sim.cli.listing import show_list
from epd_lab.sim.cli.replay import replay
from epd_lab.sim.world import TRACE_LENGTH


def add_arguments(parser: argparse.ArgumentParser) -> Any:
    """The arguments of `epd sim`; returns argparse's action of its verbs."""
    verbs = parser.add_subparsers(dest="sim_verb", required=True, metavar="VERB")
    _add_list(verbs.add_parser("list", help="drills, the faults that they cover, and what is not"))
    drill = verbs.add_parser("drill", help="run one drill, or all, under many seeds")
    drill.add_argument("name", help="a drill's name, or all")
    drill.add_argument("--seed", type=_from_0, help="only this seed")
    _add_seeds(drill, 50)
    _add_stop(drill)
    _add_search(drill)
    swarm = verbs.add_parser("swarm", help="random topologies, workloads and faults")
    swarm.add_argument("--plans", action="store_true", help="print each plan before it is run")
    _add_seeds(swarm, 500)
    _add_stop(swarm)
    _add_search(swarm)
    check = verbs.add_parser("check", help="kill -9 of each process at every step of a short run")
    check.add_argument("topology", help="such as 1e1p1d or 2e2p2d")
    check.add_argument("--stride", type=_positive, default=1, metavar="N", help="every Nth step")
    _add_stop(check)
    _add_search(check)
    model = verbs.add_parser("model", help="search small configurations exhaustively")
    names = ", ".join(model_names())
    model.add_argument("name", nargs="?", default="all", help=f"one of {names}; or all")
    model.add_argument("--json", action="store_true", help="print one JSON object")
    _add_jobs(model)
    mutant = verbs.add_parser("mutants", help="put known bugs back; the drills must notice")
    mutant.add_argument("name", nargs="?", default="all", help="a mutant's name, or all")
    _add_seeds(mutant, 30)
    _add_search(mutant)
    _add_replay(verbs.add_parser("replay", help="one seed again, with its trace"))
    return verbs


def _whole(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not {least} or more")
    return number


_positive, _from_0 = partial(_whole, 1), partial(_whole, 0)


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--measure",
        type=_positive,
        default=0,
        metavar="N",
        help="run each drill, and it with each of its mutants, on N seeds; minutes",
    )
    parser.add_argument(
        "--missing", action="store_true", help="measure only what is not measured yet"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="DRILL", help="measure these anew, and no others"
    )
    parser.add_argument("--write", action="store_true", help="write the tables to docs/drills")
    parser.add_argument("--check", action="store_true", help="exit 1 if those tables are stale")
    _add_jobs(parser)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("drill", "calm", "swarm", "check"))
    parser.add_argument(
        "name", nargs="?", default="", help="a drill, or one to calm, or a topology to check"
    )
    parser.add_argument("--seed", type=_from_0, required=True)
    parser.add_argument("--mutant", default="", metavar="NAME", help="with this bug put back")
    parser.add_argument(
        "--trace",
        type=_positive,
        nargs="?",
        const=TRACE_LENGTH,
        default=0,
        metavar="N",
        help="the event log, or its last N lines",
    )
    parser.add_argument("--grep", default="", help="only trace lines that contain this")
    parser.add_argument("--shrink", action="store_true", help="find the shortest failing plan")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the run as a page for a browser"
    )
    _add_image(parser, "write timeline (for Perfetto), sequence diagram and event log there")


def _add_seeds(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument(
        "--seeds", type=_positive, default=seeds, metavar="N", help=f"how many; default {seeds}"
    )
    parser.add_argument("--first-seed", type=_from_0, default=0, metavar="K")


def _add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop-after",
        type=_positive,
        metavar="N",
        help="end at the Nth failure; without it the run goes on and tells all of them at its end",
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    _add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_image(parser, "draw the first failures there, as replay --image does")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    jobs = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=_positive, default=jobs, metavar="N", help="processes; default: all cores"
    )


def _add_image(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--image", type=Path, metavar="DIR", help=what)


def main(args: argparse.Namespace) -> int:
    """Run a parsed `epd sim` command."""
    verbs = {
        "list": show_list,
        "drill": search.drill,
        "swarm": search.swarm,
        "check": search.check,
        "model": lambda args: check_models(args.name, jobs=args.jobs, as_json=args.json),
        "mutants": hunt.mutants_caught,
        "replay": replay,
    }
    try:
        return verbs[args.sim_verb](args)
    except (KeyError, ValueError) as error:
        print(f"epd sim: {error.args[0] if error.args else error}", file=sys.stderr)
        return 2
