"""An argparse that answers a wrong flag with one sentence and the likely right one."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from epd.errors import USAGE, Told


class UsageError(Told):
    """The command line cannot be understood; the text has the right form."""

    exit_status = USAGE


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the likeliest of `known`, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def one_of(*choices: str) -> Callable[[str], str]:
    """An argument type: one of these words."""

    def check(text: str) -> str:
        if text in choices:
            return text
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(choices)}{suggestion(text, choices)}"
        )

    check.choices = choices  # type: ignore[attr-defined]  # as argparse's own, for completion
    return check


def new_file(text: str) -> Path:
    """An argument type: a file to write, when all is done."""
    path = Path(text)
    if path.absolute().parent.is_dir():
        return path
    raise argparse.ArgumentTypeError(f"{path.parent} is no directory; make it first")


class Known(NamedTuple):
    """A flag, by all its names; or an argument, which has none."""

    names: tuple[str, ...]
    text: str
    choices: tuple[str, ...]
    takes_value: bool


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def __init__(
        self, prog: str, description: str = "", examples: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(
            prog=prog,
            description=textwrap.dedent(description).strip(),
            epilog=_examples(examples) if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError; `--help` prints and raises SystemExit(0)."""
        has_verbs = self._subparsers is not None
        read = self.parse_known_args if has_verbs else self.parse_known_intermixed_args
        try:
            args, unknown = read(arguments)
        except argparse.ArgumentError as error:
            self.error(str(error))
        if unknown:
            self._refuse(unknown[0])
        return args

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): ", _flag_first, message)
        raise UsageError(f"{message} ({self.prog} --help tells more)")

    def _refuse(self, argument: str) -> NoReturn:
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            known = [name for name in self._all_flags() if name.startswith("--")]
            self.error(f"unknown flag {flag}{suggestion(flag, known)}")
        self.error(f"unexpected argument {argument!r}")

    def _all_flags(self) -> Iterable[str]:
        yield from self._option_string_actions
        for parser in self.verbs().values():
            yield from parser._option_string_actions

    def verbs(self) -> dict[str, Parser]:
        found = (one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        return {name: parser for one in found for name, parser in one.choices.items()}

    def known(self) -> list[Known]:
        """Its flags and arguments, without those verbs."""
        return [
            Known(
                tuple(one.option_strings),
                (one.help or "").replace("%%", "%"),
                tuple(one.choices or getattr(one.type, "choices", None) or ()),
                takes_value=one.nargs != 0,
            )
            for one in self._actions
            if not isinstance(one, argparse._SubParsersAction)
        ]


def _flag_first(found: re.Match[str]) -> str:
    return f"{found[1].split('/')[-1].split(' ')[0]}: "


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    lines = ["examples:"]
    for command, meaning in examples:
        lines += [f"  {command}", f"      {meaning}"]
    return "\n".join(lines)


def parse_nbytes(text: str) -> int:
    """ "256MiB", "256M", "1G" or a plain number of bytes.  Raises ValueError."""
    found = re.fullmatch(r"(\d+)\s*(?:([KMGT])(?:iB)?|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no size; write 268435456, 256MiB or 1GiB")
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return int(found[1]) << (10 * power)


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """The object that a flag's text is.  Raises ConfigError."""
    from epd.config import ConfigError  # `epd --help` does without

    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}; write {example}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{flag} holds no object: it must be a JSON object, not {text}; write {example}"
        )
    return found
