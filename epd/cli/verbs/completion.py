"""`epd completion`: a script by which a shell completes verbs and flags.

It holds all words that there are, so that a key costs no start of Python.  bash and zsh share the
tables, whose syntax both read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from epd.cli.main import VERBS, parser_of
from epd.cli.parser import Known, Parser, UsageError, one_of

DESCRIPTION = """
Print the script by which a shell completes what is typed behind epd: verbs, flags, and the values
of those that take one of a few. All else is completed as a file.
"""

EXAMPLES = (
    ("epd completion bash > ~/.local/share/bash-completion/completions/epd", "bash, from now on"),
    ('epd completion zsh > "${fpath[1]}/_epd"', "zsh, where compinit runs"),
    ("epd completion fish > ~/.config/fish/completions/epd.fish", "fish, from now on"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", type=one_of("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


class Level(NamedTuple):
    """A verb, or a verb of a verb: what can follow."""

    path: tuple[str, ...]  # without `epd`
    verbs: dict[str, str]  # with their texts
    known: list[Known]


def levels() -> Iterator[Level]:
    """The whole command line; verbs that are not installed have no flags."""
    known = [Known(("--help",), "", (), takes_value=False)]
    known.append(Known(("--version",), "", (), takes_value=False))
    yield Level((), dict(VERBS), known)
    for verb in VERBS:
        try:
            yield from _below((verb,), parser_of(verb))
        except UsageError:  # of the laboratory
            continue


def _below(path: tuple[str, ...], parser: Parser) -> Iterator[Level]:
    verbs = {
        name: (below.description or "").partition("\n")[0] for name, below in parser.verbs().items()
    }
    yield Level(path, verbs, parser.known())
    for name, below in parser.verbs().items():
        yield from _below((*path, name), below)


def script(shell: str) -> str:
    """`shell`: bash, zsh or fish."""
    if shell == "fish":
        return "\n".join(line for level in levels() for line in _fish(level))
    return TABLES.format(*_tables()) + (BASH if shell == "bash" else ZSH)


TABLES = """\
#compdef epd
_epd_words() {{  # what may follow these words
  local at=epd word last=
  shift
  for word in "$@"; do
    last=$word
    case "$at $word" in
{0}
    esac
  done
  case "$at $last" in
{1}
  esac
  case "$at" in
{2}
  esac
}}
"""

BASH = """
_epd() {
  local found
  found=$(_epd_words "${COMP_WORDS[@]:0:COMP_CWORD}")
  COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _epd epd"""

ZSH = """
_epd() {
  local -a found
  found=(${=$(_epd_words "${(@)words[1,CURRENT-1]}")})
  compadd -a found || _files
}
if [ "$funcstack[1]" = _epd ]; then _epd "$@"; else compdef _epd epd; fi"""


def _tables() -> tuple[str, str, str]:
    """What goes a level down; what follows a flag that takes a value; what follows a level."""
    down, values, words = [], [], []
    for path, verbs, known in levels():
        at = " ".join(("epd", *path))
        down += [f"""    "{at} {verb}") at="{at} {verb}" ;;""" for verb in verbs]
        for flag in known:
            if flag.names and flag.takes_value:
                pattern = " | ".join(f'"{at} {name}"' for name in flag.names)
                values.append(f'    {pattern}) echo "{" ".join(flag.choices)}"; return ;;')
        follows = [*verbs, *(word for one in known for word in one.names or one.choices)]
        words.append(f"""    "{at}") echo "{" ".join(follows)}" ;;""")
    return "\n".join(down), "\n".join(values), "\n".join(words)


def _fish(level: Level) -> Iterator[str]:
    path, verbs, known = level
    seen = "; and ".join(f"__fish_seen_subcommand_from {verb}" for verb in path)
    if verbs and path:
        seen += f"; and not __fish_seen_subcommand_from {' '.join(verbs)}"
    begin = f"complete -c epd -n {_quoted(seen or '__fish_use_subcommand')}"
    for verb, text in verbs.items():
        yield f"{begin} -f -a {verb} -d {_quoted(text)}"
    for one in known:
        names = " ".join(map(_fish_name, one.names))
        words = f" -x -a {_quoted(' '.join(one.choices))}" if one.choices else ""
        if names:
            value = " -r" if one.takes_value and not words else ""
            yield f"{begin} {names}{value}{words} -d {_quoted(one.text)}"
        elif words:
            yield f"{begin}{words}"


def _fish_name(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
