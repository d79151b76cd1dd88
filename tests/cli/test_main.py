"""Dispatch, help, and the error boundary: a sentence and an exit status, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from epd import __version__
from epd.cli.boundary import CommandFailed, guarded
from epd.cli.main import LABORATORY, VERBS, main
from epd.config import ConfigError
from epd.engine.checkpoint import ModelError
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
        (["run"], "either --role or --topology"),
        (["run", "--role", "all", "--topology", "1epd"], "either --role or --topology"),
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
    assert capsys.readouterr().err == (
        f"epd: {what} /none.png does not exist; give a file or an http(s) URL\n"
    )


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
