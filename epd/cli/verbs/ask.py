"""`epd ask`: one question, of a running server or of a temporary one."""

from __future__ import annotations

import argparse
from pathlib import Path

from epd.cli import options

DESCRIPTION = """
Ask one question about any number of pictures and videos and print the answer. With --url a running
server is asked; without it a temporary one is started, asked, and stopped.

--json prints one object: answer, finish_reason, usage, and the timeline of states with times.
"""

EXAMPLES = (
    (
        'epd ask "What is the total?" --image receipt.png',
        "of a temporary server with the bundled model",
    ),
    (
        'epd ask "Which is dearer?" --image a.png --image b.png --url http://127.0.0.1:8000',
        "two pictures, of a running server",
    ),
    ('epd ask "What is the total?" --image receipt.png --json | jq .usage', "for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="the text of the question")
    parser.add_argument(
        "--image", dest="images", action="append", default=[], metavar="FILE",
        help="a picture file or an http(s) URL; may be repeated, the order counts",
    )  # fmt: skip
    parser.add_argument(
        "--video", dest="videos", action="append", default=[], metavar="FILE",
        help="a video file or an http(s) URL; may be repeated, after the pictures",
    )  # fmt: skip
    parser.add_argument("--url", default="", metavar="URL", help="a running server's base URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    parser.add_argument(
        "--topology", metavar="TOPOLOGY", help="of a temporary server, default 1e1p1d"
    )
    options.add_place_flags(parser)
    options.add_model_flags(parser)
    options.add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.parser import UsageError
    from epd.cli.plan import plan_topology
    from epd.cli.ports import settle_port
    from epd.cli.question import Question

    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: an answer has at least one token")
    if args.url and args.topology:
        raise UsageError("--topology is for a temporary server; with --url one runs already")
    url = check_url(args.url) if args.url else ""
    question = Question(
        args.question,
        check_files("picture", args.images),
        args.max_tokens,
        args.temperature,
        args.seed,
        check_files("video", args.videos),
    )
    if url:
        from epd.cli.demo import ask_running

        return ask_running(question, url, as_json=args.json)
    settings = settle_port(options.settings_of(args), wanted=args.port)
    log = options.log_of(args, "warning")
    plan = plan_topology(args.topology or "1e1p1d", settings, options.placing_of(args), log)
    from epd.cli.demo import ask_temporary

    return ask_temporary(question, plan, as_json=args.json)


def check_files(kind: str, names: list[str]) -> tuple[str, ...]:
    """The names, all of which are URLs or readable files.  Raises CommandFailed."""
    from epd.cli.boundary import CommandFailed

    for name in names:
        if name.startswith(("http://", "https://", "data:")):
            continue
        if not Path(name).is_file():
            raise CommandFailed(f"{kind} {name} does not exist; give a file or an http(s) URL")
    return tuple(names)


def check_url(url: str) -> str:
    """The base URL without a trailing slash and without /v1.  Raises UsageError."""
    from urllib.parse import urlsplit

    from epd.cli.parser import UsageError

    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--url {url}: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
