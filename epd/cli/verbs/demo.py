"""`epd demo`: see the main job work, in real processes."""

from __future__ import annotations

import argparse

from epd.cli.configure import options

DESCRIPTION = """
Start a gateway and one process per instance, ask about three sample images through the OpenAI
API, and print question, answer, and a timeline: in which state each stage of the request was, and
for how long. Needs neither network nor GPU: the bundled model is tiny and really reads.
"""

EXAMPLES = (
    ("epd demo", "three workers: encode, prefill, decode"),
    ("epd demo --topology 1e1pd --keep", "leave the server up, to ask more with epd ask or curl"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="1e1p1d", metavar="TOPOLOGY", help="default 1e1p1d")
    parser.add_argument("--keep", action="store_true", help="leave the server up until Ctrl-C")
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.start.plan import plan_topology
    from epd.cli.start.ports import settle_port

    settings = settle_port(options.settings_of(args), wanted=args.port)
    plan = plan_topology(
        args.topology, settings, options.placing_of(args), options.log_of(args, "warning")
    )
    from epd.cli.ask.demo import run_demo

    return run_demo(plan, keep=args.keep)
