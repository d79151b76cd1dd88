"""A conversation: lines in, streamed answers out.

A line is a question, or a command that begins with a slash.  An answer that is stopped stays in the
conversation as far as it came.  A question that failed is forgotten, or the next one would be
refused for its sake.  Answers alone go to stdout; remarks go to stderr."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from epd.cli.ask.client import Client
from epd.cli.ask.question import AskSampling, check_files, user_message
from epd.cli.boundary import CommandFailed
from epd.cli.parser import suggestion
from epd.errors import FAILED, OK
from epd.in_thread import in_thread

ReadLine = Callable[[str], Awaitable[str | None]]  # from a prompt to a line; None at the end
COMMANDS = {
    "/image": "FILE or URL: an image for the next question; as often as wanted",
    "/video": "FILE or URL: a video for the next question",
    "/reset": "forget the conversation",
    "/help": "this list",
}
KEYS = "Ctrl-C stops an answer, Ctrl-D ends"


class Conversation:
    """Questions and answers so far, and the media of the next question."""

    def __init__(self, system: str = "") -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = list(self._system)
        self._media = _no_media()

    @property
    def prompt(self) -> str:
        count = sum(map(len, self._media.values()))
        return f"({count} attached) > " if count else "> "

    def question(self, text: str) -> dict[str, Any]:
        """The next message; what was attached is used up.  Raises OSError."""
        media, self._media = self._media, _no_media()
        return user_message(text, media["/image"], media["/video"])

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash; returns the answer.  Raises CommandFailed."""
        name, _, rest = line.partition(" ")
        if name not in COMMANDS:
            raise CommandFailed(f"unknown command {name}{suggestion(name, COMMANDS)} (/help)")
        if name == "/reset":
            self.reset()
            return "the conversation is forgotten"
        if name == "/help":
            return "\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()) + f"\n{KEYS}"
        kind = "image" if name == "/image" else "video"
        medium = rest.strip().strip("'\"")
        if not medium:
            raise CommandFailed(f"{name} needs a file or an http(s) URL")
        medium = os.path.expanduser(medium)  # and no URL is touched
        self._media[name] += check_files(kind, [medium])
        return f"a {kind} goes with the next question: {medium}"


def _no_media() -> dict[str, list[str]]:
    """What is attached, by the command that attaches it."""
    return {"/image": [], "/video": []}


class Chat:
    def __init__(self, client: Client, conversation: Conversation, sampling: AskSampling) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling
        self._answer: asyncio.Future[Any] | None = None

    def stop_answer(self) -> bool:
        """End the answer that is being given; False if there is none."""
        return self._answer is not None and self._answer.cancel()

    async def run(self, read_line: ReadLine) -> int:
        """Until the lines end; FAILED if one of them could not be answered."""
        status = OK
        while (line := await read_line(self._conversation.prompt)) is not None:
            try:
                if line.startswith("/"):
                    _note(self._conversation.command(line.strip()))
                elif line.strip():
                    await self._turn(line)
            except (CommandFailed, OSError) as error:
                _note(f"epd: {error}")
                status = FAILED
        return status

    async def _turn(self, text: str) -> None:
        """Raises CommandFailed, and OSError for a file that is gone."""
        question = self._conversation.question(text)
        messages = [*self._conversation.messages, question]
        said: list[str] = []

        def show(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        self._answer = asyncio.ensure_future(self._client.ask(messages, self._sampling, show))
        remark = ""
        try:
            if (await self._answer).finish_reason == "length":
                remark = f"(cut at {self._sampling.max_tokens} tokens: --max-tokens)"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # not the answer alone ends
                raise
            remark = "(stopped)"
        finally:
            self._answer = None
            print(flush=True)
        if remark:
            _note(remark)
        if said:
            answer = {"role": "assistant", "content": "".join(said)}
            self._conversation.messages += [question, answer]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def chat(client: Client, conversation: Conversation, sampling: AskSampling) -> int:
    """With whoever is at the terminal or at the other end of the pipe; returns the exit status."""
    talk = Chat(client, conversation, sampling)
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, lambda: talk.stop_answer() or task.cancel())
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return await talk.run(_read_pipe)
    from epd.cli.ask.prompt import TerminalPrompt

    _note(f"{client.model} listens; /help lists commands, {KEYS}")
    await talk.run(TerminalPrompt(COMMANDS).read_line)
    return OK


async def _read_pipe(prompt: str) -> str | None:
    """A line of stdin, by a thread of its own: a read cannot be taken back."""
    text = await in_thread(sys.stdin.readline, "stdin")
    return text.rstrip("\n") if text else None
