"""Dispatch, help, and the error boundary: a sentence and an exit status, never a traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from epd import __version__
from epd.cli.ask.question import MAX_PIPED_NBYTES, read_piped
from epd.cli.boundary import CommandFailed, guarded
from epd.cli.main import LABORATORY, VERBS, main, parser_of
from epd.cli.verbs.ask import text_of
from epd.config import ConfigError
from epd.model_files.checkpoint import ModelError
from epd.transport.base import TransportError

ROOT = Path(__file__).parents[2]

Captured = pytest.CaptureFixture[str]


def test_help_lists_every_verb(capsys: Captured) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb}" in text for verb in VERBS)
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_explains_and_gives_examples(verb: str, capsys: Captured) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: epd {verb}" in text
    assert f"examples:\n  epd {verb}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"epd {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dmo"], "unknown verb 'dmo'; did you mean demo?"),
        (["--verson"], "unknown flag '--verson'"),
        (["run"], "--role, --topology, --rank-of or --auto"),
        (["run", "--role", "all", "--topology", "1epd"], "--role, --topology, --rank-of or --auto"),
        (["run", "--topolgy", "1epd"], "unknown flag --topolgy; did you mean --topology?"),
        (["run", "--topology"], "--topology: expected one argument"),
        (["run", "--topology", "1epd", "more"], "unexpected argument 'more'"),
        (["run", "--topology", "1epd", "--id", "x"], "--id names one process"),
        (["run", "--topology", "1epd", "--log-level", "dbug"], "did you mean debug?"),
        (["run", "--topology", "1epd", "--kv-nbytes", "lots"], "'lots' is no size"),
        (["run", "--topology", "1epd", "--device", "tpu"], "engine.device is 'tpu'"),
        (["run", "--role", "encod"], "role 'encod' is unknown"),
        (["demo", "--topology", "2e"], "no prefill"),
        (["demo", "--port", "x"], "--port: invalid int value"),
        (["ask"], "question"),
        (["ask", "hi", "--url", "localhost"], "write http://HOST:PORT"),
        (["ask", "hi", "--max-tokens", "0"], "at least one token"),
        (["ask", "what", "is", "this", "--url", "http://h"], "put the question in quotes"),
        (["ask", "-", "-", "--url", "http://h"], "unexpected '-'"),
        (["ask", "hi", "--url", "http://h", "--topology", "1epd"], "one runs already"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["sim"], "VERB"),
        (["sim", "dril"], "invalid choice: 'dril'"),
        (["sim", "drill", "all", "--seed", "x"], "--seed: invalid int value"),
        (["sim", "drill", "all", "--sedes", "3"], "did you mean --seeds?"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(
    arguments: list[str], said: str, capsys: Captured
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("epd: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


class Missing:
    """Finds nothing of the laboratory, whoever else would."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "epd_lab":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("verb", LABORATORY)
def test_a_verb_of_a_missing_laboratory_says_where_it_is(
    verb: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "epd_lab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main([verb]) == 2
    assert "pip install epd-lab" in capsys.readouterr().err


def test_a_missing_model_is_status_1(capsys: Captured, tmp_path: Path) -> None:
    status = main(["run", "--topology", "1epd", "--port", "0", "--model", str(tmp_path / "none")])
    assert status == 1
    assert "none does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "what"), [("--image", "image"), ("--video", "video")])
def test_a_missing_image_or_video_is_status_1(flag: str, what: str, capsys: Captured) -> None:
    assert main(["ask", "hi", flag, "/none.png"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"epd: {what} /none.png does not exist; give a file or an http(s) URL")
    sample = told.strip().partition(", such as ")[2]
    assert Path(sample).is_file() if what == "image" else not sample


def test_the_readme_names_files_that_are_there() -> None:
    """And its examples are typed from the folder in which it lies."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\.venv/bin/python -m (epd .*?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(commands) > 8
    for command in commands:
        _, verb, *words = shlex.split(command)
        args = vars(parser_of(verb).parse(words))
        assert all((ROOT / name).is_file() for name in args.get("images") or ()), command


# --- text from a pipe -----------------------------------------------------------------------------


def piped(data: bytes) -> str:
    """What `-` stands for.  Raises CommandFailed."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return read_piped(file.fileno())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"What?\n", "What?"),
        ("﻿one\n\ntwo größe\n".encode(), "one\n\ntwo größe"),
        (b"x" * MAX_PIPED_NBYTES, "x" * MAX_PIPED_NBYTES),
    ],
)
def test_text_from_a_pipe_is_the_question(data: bytes, text: str) -> None:
    assert piped(data) == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "stdin is empty"),
        (b" \n\t\n", "stdin is empty"),
        (b"x" * (MAX_PIPED_NBYTES + 1), "more than 1 MiB"),
        (b"\x89PNG\r\n", "no text in UTF-8 (byte 0); a picture goes with --image"),
        (b"fine, then \xff", "(byte 11)"),
        (b"one\0two", "zero bytes"),
    ],
)
def test_what_is_no_question_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(CommandFailed, match=re.escape(said)):
        piped(data)


def test_a_terminal_and_what_cannot_be_read_are_no_pipe() -> None:
    ours, theirs = os.openpty()
    directory = os.open("/tmp", os.O_RDONLY)
    try:
        with pytest.raises(CommandFailed, match="stdin is a terminal"):
            read_piped(theirs)
        with pytest.raises(CommandFailed, match="stdin cannot be read: Is a directory"):
            read_piped(directory)
    finally:
        for fd in (ours, theirs, directory):
            os.close(fd)


def test_a_dash_stands_alone_or_behind_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.cli.ask.question.read_piped", lambda: "of a pipe")
    assert text_of(["Why?"]) == "Why?"
    assert text_of(["-"]) == "of a pipe"
    assert text_of(["Why?", "-"]) == "Why?\n\nof a pipe"
    args = parser_of("ask").parse(["Why?", "--image", "x.png", "-", "--json"])
    assert (args.question, args.images) == (["Why?", "-"], ["x.png"])


def test_a_port_in_use_is_refused_with_a_free_one(capsys: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "--topology", "1epd", "--port", str(port)]) == 2
        said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is in use" in said
    assert "choose another: --port " in said


def test_show_config_prints_what_would_be_used(capsys: Captured) -> None:
    flags = ["--topology", "1epd", "--kv-nbytes", "1GiB", "--set", "timing.max_attempts=2"]
    assert main(["run", *flags, "--show-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["engine"]["kv_nbytes"] == 1 << 30
    assert shown["timing"]["max_attempts"] == 2


EC_FILE = (
    '{"ec_connector": "ECExampleConnector", "ec_role": "ec_producer", '
    '"ec_connector_extra_config": {"shared_storage_path": "/mnt/rows"}}'
)


def test_show_config_hides_keys_and_knows_all_names(capsys: Captured) -> None:
    flags = ["--api-key", "secret", "other", "--served-model-name", "a", "b"]
    assert main(["run", "--role", "gateway", *flags, "--show-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["access"]["api_keys"] == ["...", "..."]
    assert (shown["model_name"], shown["model_aliases"]) == ("a", ["b"])


def test_show_config_shows_what_connectors_say(capsys: Captured) -> None:
    flags = ["--role", "encode", "--ec-transfer-config", EC_FILE]
    assert main(["run", *flags, "--show-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["transport"], shown["transport_directory"]) == ("file", "/mnt/rows")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--role", "encode", "--ec-transfer-config", "garbage"], "is not JSON"),
        (["--topology", "1e1pd", "--kv-transfer-config", "{}"], "has no kv_connector"),
        (["--role", "decode", "--ec-transfer-config", EC_FILE], "has no part in this hop"),
        (["--ec-transfer-config", EC_FILE], "depends on the roles: add --role or --topology"),
    ],
)
def test_show_config_checks_connectors(flags: list[str], words: str, capsys: Captured) -> None:
    assert main(["run", *flags, "--show-config"]) == 2
    assert words in capsys.readouterr().err


# --- the boundary ---------------------------------------------------------------------------------


def fail_with(error: BaseException) -> int:
    def work() -> int:
        raise error

    return guarded(work)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("set x"), 2),
        (ModelError("copy it again"), 1),
        (TransportError("choose another port"), 1),
        (CommandFailed("do this"), 1),
        (ExceptionGroup("group", [ModelError("copy it again")]), 1),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [ConfigError("set x")])]), 2),
    ],
)
def test_known_errors_are_printed_as_they_are(
    error: Exception, status: int, capsys: Captured
) -> None:
    assert fail_with(error) == status
    inner: BaseException = error
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    assert capsys.readouterr().err == f"epd: {inner}\n"


def test_a_bug_is_named_with_its_place_and_no_traceback(capsys: Captured) -> None:
    assert fail_with(ZeroDivisionError("by zero")) == 1
    said = capsys.readouterr().err
    assert "internal error" in said
    assert "test_main.py:" in said
    assert "Traceback" not in said


def test_the_traceback_is_one_variable_away(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_TRACEBACK", "1")
    assert fail_with(ConfigError("set x")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_silent(capsys: Captured) -> None:
    assert fail_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_an_absent_library_points_at_the_doctor(capsys: Captured) -> None:
    assert fail_with(ModuleNotFoundError("No module named 'zmq'", name="zmq")) == 1
    assert "zmq is not installed; epd doctor tells" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(capsys: Captured) -> None:
    assert main(["diagrams", "--out", "/proc/none"]) == 1
    assert capsys.readouterr().err.startswith("epd: /proc/none: ")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`epd doctor | head -c 0`: no complaint about the pipe, not even at interpreter exit."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "epd", "--help"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.stderr == ""


def test_the_module_and_the_command_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epd", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"epd {__version__}\n")
