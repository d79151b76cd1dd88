"""`epd list`: the machines of a running cluster, by kind, state and age."""

from __future__ import annotations

import argparse

from epd.cli.configure import options
from epd.cli.look.machines import KINDS
from epd.cli.parser import one_of

DESCRIPTION = """
List what a running cluster works on, the oldest first: requests, transfers (both ends of each
room), images (offered, encoded, kept), instances, or links between processes that are in doubt.
Each line is one state machine at one process, with the time that it has been in its state.

`epd story KEY` tells what happened to one of them. --json prints the list as the gateway tells it.
"""

EXAMPLES = (
    (
        "epd list transfers --state QUARANTINED --older 5s",
        "memory that waits for an outcome, for more than five seconds",
    ),
    ("epd list transfers --late", "what stays in its state though its time is over"),
    ("epd list requests --state WAITING_FOR_EMBEDDINGS", "prompts whose images are not there yet"),
    ("epd list instances", "roles, lives, memory and what each process owns now"),
    ("epd list images --json | jq -r '.machines[].key'", "for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", type=one_of(*KINDS), help=", ".join(KINDS))
    parser.add_argument(
        "--state", action="append", default=[], metavar="STATE",
        help="only machines in this state; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--older", type=options.seconds, default=0.0, metavar="TIME",
        help="only those in their state for so long: 500ms, 5s, 2m",
    )  # fmt: skip
    parser.add_argument(
        "--late", action="store_true", help="only those that stay though their time is over"
    )
    parser.add_argument("--instance", default="", metavar="NAME", help="only those of this process")
    parser.add_argument(
        "--limit",
        type=int,
        default=50,
        metavar="N",
        help="of each process, default 50, at most 200",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.look.machines import machine_lines, process_lines

    shows_processes = args.kind == "instances" and not (args.state or args.older or args.late)
    query = {
        "machine": ",".join(KINDS[args.kind]),
        "state": ",".join(args.state),
        "older_s": str(args.older),
        "late": str(int(args.late)),
        "instance": args.instance,
        "limit": str(args.limit),
    }

    async def work(client: Client) -> int:
        told = await client.state(query)
        if args.json:
            name = "processes" if shows_processes else "machines"
            print(msgspec.json.encode({name: getattr(told, name)}).decode())
        else:
            print("\n".join((process_lines if shows_processes else machine_lines)(told)))
        return 0

    return with_server(running_of(args), work)
