"""`epd story`: what happened to one request, room or image, at each process."""

from __future__ import annotations

import argparse

from epd.cli.configure import options

DESCRIPTION = """
Tell the stories of all machines with this key, or below it, merged by time: those of a request with
its attempts, its images' rooms and its KV room, at every process that has a part in it; those of a
room at both its ends; those of an image (its mm_hash) at encoders and prefill instances. Of what is
over, each process remembers the last few hundred machines.

Times are those of the gateway's clock, as each process knows it: right to milliseconds.
"""

EXAMPLES = (
    (
        "epd story gateway-19a3f2-17",
        "a request; the log's `request=` and the end of an answer's id",
    ),
    ("epd story gateway-19a3f2-17/1/kv", "both ends of the room in which its KV moves"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", help="of a request, a room or an image (epd list shows them)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import running_of, with_server
    from epd.cli.boundary import CommandFailed
    from epd.cli.look.machines import story_lines

    async def work(client: Client) -> int:
        told = await client.state({"key": args.key, "limit": "200"})
        if not told.machines:
            raise CommandFailed(
                f"no process knows {args.key!r} (any more); epd list requests shows what is open"
            )
        machines = told.machines
        if args.json:
            print(msgspec.json.encode({"machines": machines}).decode())
        else:
            print("\n".join(story_lines(machines)))
        return 0

    return with_server(running_of(args), work)
