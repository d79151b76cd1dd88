"""The prompt of `epd chat` at a terminal: a line that can be edited, with history and completion.

prompt_toolkit reads keys on the event loop, so that a temporary cluster lives on beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document


class _Interrupted(Exception):
    """Ctrl-C: the line is dropped."""


class TerminalPrompt:
    def __init__(self, commands: Mapping[str, str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            completer=_Commands(commands),
            complete_while_typing=False,
            interrupt_exception=_Interrupted,
        )

    async def read_line(self, prompt: str) -> str | None:
        """The next line; None at Ctrl-D."""
        while True:
            try:
                return await self._session.prompt_async(prompt, handle_sigint=False)
            except _Interrupted:
                continue
            except EOFError:
                return None


class _Commands(Completer):
    """Tab completes commands, and paths behind those that take one."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, rest = text.partition(" ")
        if space and self._commands.get(name, "").startswith("FILE"):
            yield from self._paths.get_completions(Document(rest, len(rest)), event)
        elif text.startswith("/") and not space:
            for command in self._commands:
                if command.startswith(text):
                    yield Completion(command, -len(text))
