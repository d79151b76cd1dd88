"""`epd keys`: API keys in the file that a gateway reads."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from epd.cli.configure import options
from epd.cli.parser import UsageError, one_of

if TYPE_CHECKING:
    from epd.api.http.key_file import ApiKey
    from epd.cli.ask.client import Client

DESCRIPTION = """
Make, list and remove the API keys of a file that a gateway reads: epd run --key-file FILE. A key is
printed when it is made, and never again, since the file holds its hash alone. A gateway that runs
takes a changed file within two seconds; reload has it read the file, and the certificates of HTTPS,
at once, and tells what is wrong with them.

make NAME prints a new key. Holders of keys of one --tenant share cached prompts and images; without
it a key's holder shares them with nobody. Only an --operator looks at the cluster or changes it.
remove NAME takes effect with the next request of its holder; open answers go on.
"""

EXAMPLES = (
    (
        "epd keys make ann --key-file keys.jsonl --tenant acme --expires 90d --concurrency 8",
        "a key for 90 days and eight answers at a time; the file is made if there is none",
    ),
    ("epd keys list --key-file keys.jsonl", "names, tenants, expiries and limits"),
    ("epd keys remove ann --key-file keys.jsonl", "it is refused from now on"),
    ("epd keys reload --url https://gpu7:8000", "another host's gateway reads its files again"),
)
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", type=one_of("make", "list", "remove", "reload"), help="make, list, remove, reload"
    )
    parser.add_argument("name", nargs="?", default="", help="of a key: make and remove need it")
    parser.add_argument("--key-file", default="", metavar="FILE", help="where the hashes are")
    parser.add_argument("--tenant", metavar="NAME", help="of the new key; default: its own")
    parser.add_argument(
        "--expires", type=options.seconds, metavar="TIME", help="from now: 12h, 90d; default: never"
    )
    for name in LIMITS:
        text = "of the new key; 0: no limit; default of all three: as the gateway is set"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument("--operator", action="store_true", help="the new key is an operator's")
    options.add_running_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.action == "reload":
        return _reload(args)
    if not args.key_file or bool(args.name) == (args.action == "list"):
        raise UsageError("write epd keys make NAME --key-file FILE, or remove NAME, or list")
    from epd.api.http.key_file import changed, read_keys
    from epd.cli.boundary import CommandFailed
    from epd.cli.look.machines import columns

    if args.action == "list":
        head = "NAME", "TENANT", "EXPIRES_AT", "OPERATOR", "LIMITS"
        rows = [
            [str(getattr(key, field.lower()) or "") for field in head]
            for key in read_keys(args.key_file).values()
        ]
        print("\n".join(columns(head, rows)))
        return 0
    try:
        with changed(args.key_file) as keys:
            found = [key for key in keys if key.name == args.name]
            if bool(found) == (args.action == "make"):
                has = "has a" if found else "has no"
                raise CommandFailed(f"{args.key_file} {has} key {args.name}; epd keys list")
            if found:
                keys.remove(*found)
            else:
                text = _make(args, keys)
    except OSError as error:
        raise CommandFailed(f"{args.key_file} cannot be written: {error.strerror}") from None
    if not found:
        print("shown this once; the file has its hash", file=sys.stderr)
        print(text)
    return 0


def _make(args: argparse.Namespace, keys: list[ApiKey]) -> str:
    """Add a key; its text.  Raises UsageError."""
    from datetime import UTC, datetime, timedelta

    import msgspec

    from epd.api.http.identity import digest_of
    from epd.api.http.key_file import ApiKey, new_key

    text = new_key()
    limits = {name: given for name in LIMITS if (given := getattr(args, name)) is not None}
    line = {"name": args.name, "sha256": digest_of(text.encode()).hex(), "tenant": args.tenant}
    line |= {"operator": args.operator, "limits": limits or None}
    if args.expires is not None:
        line["expires_at"] = datetime.now(UTC).replace(microsecond=0) + timedelta(0, args.expires)
    try:
        keys.append(msgspec.convert(line, ApiKey))
    except msgspec.ValidationError as error:
        raise UsageError(f"{error}; names have up to 64 letters, digits and . _ -") from None
    return text


def _reload(args: argparse.Namespace) -> int:
    from epd.cli.ask.temporary import running_of, with_server

    async def work(client: Client) -> int:
        print(await client.reload())
        return 0

    return with_server(running_of(args), work)
