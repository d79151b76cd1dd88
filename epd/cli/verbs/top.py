"""`epd top`: a running cluster on a full screen."""

from __future__ import annotations

import argparse
import sys

from epd.cli.configure import options

DESCRIPTION = """
Watch a running cluster: its processes with their roles, memory and what they own; how many state
machines are in each state, how long the oldest has been there, and how many enter it per second.
Enter looks into a state at its oldest machines, and into one of them at its story, with that of its
peer. Space holds the picture still.

For programs: epd list and epd story with --json, or GET /state.
"""

EXAMPLES = (
    ("epd top", "the server on this host"),
    ("epd top --url http://gpu7:8000 --every 5s", "another host's, every five seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every", type=options.seconds, default=1.0, metavar="TIME",
        help="between two looks, default 1s",
    )  # fmt: skip
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.look.screen import show
    from epd.cli.parser import UsageError

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("epd top needs a terminal; epd list --json is for programs")
    running = running_of(args)

    async def work(client: Client) -> int:
        await show(client, running.base_url, max(0.1, args.every))
        return 0

    return with_server(running, work)
