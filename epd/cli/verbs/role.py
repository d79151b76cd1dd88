"""`epd role`: one instance of a running cluster gets other roles."""

from __future__ import annotations

import argparse

from epd.cli.configure import options
from epd.cli.verbs.drain import add_back_flag, add_drain_flags

DESCRIPTION = """
Give an instance other roles while the cluster serves. It drains as with epd drain, and its process
goes on as a new epoch: weights that both need stay, others are loaded, and memory is planned anew.
If that fails it has its former roles again, and this command prints the reason. A process that its
supervisor starts anew has the roles that it had last.

Refused: an instance without which a stage has nobody, unless --force, and a group of ranks.
"""

EXAMPLES = (
    ("epd role e1 decode", "the second encoder decodes from now on"),
    ("epd role d0 encode,prefill,decode --within 0s", "what is open there moves at once"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the instance: epd list instances")
    parser.add_argument("roles", metavar="ROLES", type=_roles, help="of encode,prefill,decode")
    add_drain_flags(parser)
    add_back_flag(parser)
    options.add_running_flags(parser)


def _roles(text: str) -> tuple[str, ...]:
    from epd.config import ConfigError
    from epd.topology import parse_roles

    try:
        return parse_roles(text.replace(",", "+"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.look.drains import switch

    async def work(client: Client) -> int:
        times = args.within, args.back_within
        await switch(client, args.name, args.roles, *times, forced=args.force)
        return 0

    return with_server(running_of(args), work)
