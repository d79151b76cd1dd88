"""`epd chat`: a conversation with images, with a running server or a temporary one."""

from __future__ import annotations

import argparse

from epd.cli.configure import options

DESCRIPTION = """
Hold a conversation. Answers come as they are made; the model sees all that was said before, and
what /image attaches goes with the next question. With --url a running server is asked; without it
a temporary one is started, and stopped at the end.

Commands: /image FILE, /video FILE, /reset, /help. Ctrl-C stops an answer, not the conversation;
Ctrl-D ends it. From a pipe each line is a question or a command, and stdout gets answers only.
"""

EXAMPLES = (
    ("epd chat", "with the bundled model; try /image and a receipt"),
    ("epd chat --url http://127.0.0.1:8000 --max-tokens 1024", "with a running server"),
    (
        r"printf '/image receipt.png\nWhat is the total?\n' | epd chat --url http://127.0.0.1:8000",
        "from a pipe",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="a system message to begin with"
    )
    options.add_sampling_flags(parser, max_tokens=512)
    options.add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    from epd.cli.ask.chat import Conversation, chat
    from epd.cli.ask.client import Client
    from epd.cli.ask.temporary import server_of, with_server

    sampling = options.sampling_of(args)

    async def work(client: Client) -> int:
        return await chat(client, Conversation(args.system), sampling)

    return with_server(server_of(args), work)
