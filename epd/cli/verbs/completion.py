"""`epd completion`: a script by which a shell completes verbs and flags."""

from __future__ import annotations

import argparse

from epd.cli.parser import one_of

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
    from epd.cli.completion import script

    print(script(args.shell))
    return 0
