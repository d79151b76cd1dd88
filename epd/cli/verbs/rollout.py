"""`epd rollout`: every instance is restarted, one by one, while the cluster serves."""

from __future__ import annotations

import argparse

from epd.cli.configure import options
from epd.cli.verbs.drain import add_back_flag, add_drain_flags

DESCRIPTION = """
Restart the instances of a running cluster one by one, as after an update of the program or of the
model's files. Each drains as with epd drain; its supervisor starts its next life; when that serves,
the next one is asked. An instance that does not come back stops the rollout: the rest goes on as it
was. The gateway itself is not restarted.
"""

EXAMPLES = (
    ("epd rollout", "all instances; what is open 30 s later moves"),
    ("epd rollout pd0 pd1 --within 5s", "these two"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="instances, in this order; none: all of them"
    )
    add_drain_flags(parser)
    add_back_flag(parser)
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.look.drains import rollout

    async def work(client: Client) -> int:
        await rollout(client, args.names, args.within, args.back_within, forced=args.force)
        return 0

    return with_server(running_of(args), work)
