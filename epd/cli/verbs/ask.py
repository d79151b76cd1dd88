"""`epd ask`: one question, of a running server or of a temporary one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epd.cli.configure import options
from epd.cli.parser import UsageError

DESCRIPTION = """
Ask one question about any number of images and videos and print the answer as it comes. With
--url a running server is asked; without it a temporary one is started, asked, and stopped.

--json prints one object: answer, finish_reason, usage, and the timeline of states with times.
"""

EXAMPLES = (
    (
        'epd ask "What is the total?" --image receipt.png',
        "of a temporary server with the bundled model",
    ),
    (
        'epd ask "Which is dearer?" --image a.png --image b.png --url http://127.0.0.1:8000',
        "two images, of a running server",
    ),
    ('git diff | epd ask "What does this change?" - --url http://127.0.0.1:8000', "from a pipe"),
    ('epd ask "What is the total?" --image receipt.png --json | jq .usage', "for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question", nargs="+", help="its text, in quotes; -, alone or behind it: text from stdin"
    )
    parser.add_argument(
        "--image", dest="images", action="append", default=[], metavar="FILE",
        help="an image file or an http(s) URL; may be repeated, the order counts",
    )  # fmt: skip
    parser.add_argument(
        "--video", dest="videos", action="append", default=[], metavar="FILE",
        help="a video file or an http(s) URL; may be repeated, after the images",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_sampling_flags(parser, max_tokens=128)
    options.add_server_flags(parser)


def text_of(words: Sequence[str]) -> str:
    """The question.  Raises UsageError, and CommandFailed for what stdin holds."""
    from epd.cli.ask.question import read_piped

    text, *more = words
    if more not in ([], ["-"]) or words == ["-", "-"]:
        raise UsageError(f"unexpected {more[0]!r}: put the question in quotes, as one argument")
    if text == "-":
        return read_piped()
    return f"{text}\n\n{read_piped()}" if more else text


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.client import Client
    from epd.cli.ask.question import check_files, user_message
    from epd.cli.ask.temporary import server_of, with_server

    sampling = options.sampling_of(args)
    images, videos = check_files("image", args.images), check_files("video", args.videos)

    server = server_of(args)
    text = text_of(args.question)

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    async def work(client: Client) -> int:
        question = user_message(text, images, videos)
        answer = await client.ask([question], sampling, len if args.json else show)
        print(answer.as_json() if args.json else "", flush=True)
        return 0

    return with_server(server, work)
