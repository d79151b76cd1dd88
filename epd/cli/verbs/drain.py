"""`epd drain`: one instance takes no new work, finishes or moves what is open, and leaves."""

from __future__ import annotations

import argparse

from epd.cli.configure import options

DESCRIPTION = """
Take one instance out of a running cluster. New work goes to other instances at once. What is open
there may end; what is still open at the bound is moved: other instances go on with the prompt and
the tokens so far, and clients see a pause and no error. Then the instance leaves, its process ends,
and its supervisor does not start it again. SIGTERM and SIGHUP to the process do the same, with the
bound of --drain-timeout; after these a supervisor starts it anew.

Until it has left, lines on stderr show what it holds and when the rest moves.
"""

EXAMPLES = (
    ("epd drain pd1", "what is open 30 s later moves"),
    ("epd drain pd1 --within 60s --url http://gpu7:8000", "another host's; at 60 s the rest moves"),
    ("epd drain e0 --within 0s --force", "at once, though it is the only encoder"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the instance: epd list instances")
    add_drain_flags(parser)
    options.add_running_flags(parser)


def add_drain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--within", type=options.seconds, default=30.0, metavar="TIME",
        help="what is open then moves to other instances, default 30s",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true",
        help="also the only instance of a role: requests wait until another one joins",
    )  # fmt: skip


def add_back_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--back-within", type=options.seconds, default=600.0, metavar="TIME",
        help="so long the next life of an instance may load, default 10m",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.look.drains import drain, say

    async def work(client: Client) -> int:
        last = await drain(client, args.name, args.within, forced=args.force)
        say(f"{args.name} has left")
        return int(last.state == "LOST")

    return with_server(running_of(args), work)
