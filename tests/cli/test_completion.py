"""Shells complete every verb and every flag that there is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from epd.cli.main import VERBS, main
from epd.cli.verbs.completion import levels, script


@cache
def cases() -> list[tuple[tuple[str, ...], list[str]]]:
    """What stands before the cursor, and all that may follow."""
    found = []
    for path, verbs, known in levels():
        at = ("epd", *path)
        words = [word for one in known for word in one.names or one.choices]
        found.append((at, [*verbs, *words]))
        valued = (one for one in known if one.takes_value)
        found += [((*at, name), list(one.choices)) for one in valued for name in one.names]
    return found


def test_the_cases_are_all_of_them() -> None:
    known = dict(cases())
    assert set(VERBS) <= set(known["epd",]) and {verb for _, verb, *_ in list(known)[1:]} >= set(
        VERBS
    )
    assert "--topology" in known["epd", "run"] and "--seeds" in known["epd", "sim", "drill"]
    assert known["epd", "run", "--log-level"] == ["debug", "info", "warning", "error"]
    assert known["epd", "run", "--model"] == [], "a file"
    assert "transfers" in known["epd", "list"]


def said(shell: str, program: list[str]) -> Iterator[list[str]]:
    lines = "\n".join([script(shell), *program])
    done = subprocess.run(
        [shell], input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr
    for line in done.stdout.splitlines():
        yield line.split()


def typed(words: tuple[str, ...]) -> str:
    return " ".join(f"'{word}'" for word in words)


def test_bash_completes_every_verb_and_flag() -> None:
    program = [f"_epd_words {typed(words)}" for words, _ in cases()]
    begun = {"run --topo": "--topology", "list tr": "transfers", "run --log-level w": "warning"}
    program.append("complete -p epd >/dev/null")
    for words in begun:
        program.append(f"COMP_WORDS=(epd {words}); COMP_CWORD={len(words.split())}; _epd")
        program.append("echo ${COMPREPLY[*]}")
    found = list(said("bash", program))
    assert found[: -len(begun)] == [wanted for _, wanted in cases()]
    assert found[-len(begun) :] == [[word] for word in begun.values()]


def test_zsh_knows_the_same_words() -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    program = [f"_epd_words {typed(words)}" for words, _ in cases()]
    found = list(said("zsh", ["compdef() { :; }", *program]))
    assert found == [wanted for _, wanted in cases()]


def test_fish_completes_every_verb_and_flag() -> None:
    lines = script("fish").splitlines()
    for path, verbs, known in levels():
        seen = "; and ".join(f"__fish_seen_subcommand_from {verb}" for verb in path)
        at = [line for line in lines if f"-n '{seen or '__fish_use_subcommand'}" in line]
        assert all(any(f" -a {verb} " in line for line in at) for verb in verbs)
        for name in (name for one in known for name in one.names):
            kind = "l" if name.startswith("--") else "s" if len(name) == 2 else "o"
            assert any(f" -{kind} {name.lstrip('-')} " in line for line in at), (path, name)
        values = (" ".join(one.choices) for one in known if one.choices)
        assert all(any(f" -x -a '{words}'" in line for line in at) for words in values)
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    asks = [f"complete -C '{' '.join(words)} -' | string join ' '" for words, _ in cases()]
    for (words, wanted), found in zip(cases(), said("fish", asks), strict=True):
        flags = {word for word in wanted if word.startswith("--")}
        assert flags <= set(found), words


def test_another_shell_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of bash, zsh, fish" in capsys.readouterr().err
