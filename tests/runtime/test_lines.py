"""Lines for people, onto everything that stderr may be: nobody waits, nobody fails (fault F69)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from epd.runtime.lines import MAX_QUEUED_NBYTES, Lines
from epd.runtime.logs import LinesHandler, TextFormatter
from tests.patience import PATIENCE_S

AT_ONCE_S = 0.5  # many times what it takes, on a busy machine


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextlib.contextmanager
def pipe_that_nobody_reads() -> Iterator[int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):  # full from the start
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)  # which lets the thread go; it may have lines for `writer` still


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def closed() -> Iterator[int]:
    yield 1 << 20


FAULTS = (broken_pipe, pipe_that_nobody_reads, full_disk, closed)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@each_fault
def test_saying_neither_waits_nor_fails(fault: contextlib.ExitStack) -> None:
    with fault() as fd:
        lines = Lines(fd)
        began_s = time.monotonic()
        for _ in range(2000):
            lines.say("x" * 1000)
        assert time.monotonic() - began_s < AT_ONCE_S
        is_written = lines.flush(0.05 if fault is pipe_that_nobody_reads else PATIENCE_S)
        assert lines.num_lost > 500, "what does not fit is dropped and counted"
        assert lines._nbytes <= MAX_QUEUED_NBYTES
        assert is_written == (fault is not pipe_that_nobody_reads)


@each_fault
def test_a_log_line_neither_waits_nor_fails(
    fault: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gateway or a worker, whose loop logs."""
    with fault() as fd:
        monkeypatch.setattr("epd.runtime.lines.say", Lines(fd).say)
        handler = LinesHandler()
        handler.setFormatter(TextFormatter("e0"))
        record = logging.LogRecord("epd", logging.WARNING, "", 0, "x" * 1000, None, None)
        began_s = time.monotonic()
        for _ in range(500):
            handler.handle(record)
        handler.handle(logging.LogRecord("epd", logging.INFO, "", 0, "%d", ("no number",), None))
        assert time.monotonic() - began_s < AT_ONCE_S


def test_what_was_lost_is_told_by_the_next_line_and_in_its_form() -> None:
    reader, writer = os.pipe()
    lines = Lines(writer)
    lines.note = lambda num_lost: json.dumps({"lost": num_lost})
    held = threading.Event()
    write, lines._write = lines._write, lambda data: held.wait(PATIENCE_S) and write(data)
    lines.say("first")
    while lines._queue:
        time.sleep(0.001)
    num_said = MAX_QUEUED_NBYTES // 1000 + 20
    for _ in range(num_said):
        lines.say("y" * 999)
    lost = lines.num_lost
    held.set()
    data = b""
    while data.count(b"y" * 999) < num_said - lost:
        data += os.read(reader, 1 << 16)
    assert lines.flush(PATIENCE_S) and 0 < lost < 30
    first, note, _, *_ = data.splitlines()
    assert (first, json.loads(note)) == (b"first", {"lost": lost}) and lines.num_lost == 0
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_slow_gets_all_and_delays_nobody() -> None:
    reader, writer = os.pipe()
    lines = Lines(writer)
    os.set_blocking(writer, False)  # as another process may do to a shared one
    began_s = time.monotonic()
    for number in range(300):
        lines.say(f"{number} {'z' * 1000}")
    assert time.monotonic() - began_s < AT_ONCE_S
    data = b""
    while data.count(b"\n") < 300:
        data += os.read(reader, 1 << 15)
    assert [int(line.split()[0]) for line in data.splitlines()] == list(range(300))
    os.close(reader)
    os.close(writer)


PROGRAM = """
import contextlib, os, sys
from epd.cli import main
from epd.runtime import lines
main.main = lambda: 0
with contextlib.suppress(SystemExit):
    main.run()  # as the command begins
lines.say("of the parent")
lines.flush()
pid = os.fork()
lines.say("of the child" if not pid else "last words")
if not pid:
    lines.flush()
    os._exit(0)
os.waitpid(pid, 0)
print("printed", file=sys.stderr)
with open(os.devnull) as file:
    sys.exit(file.fileno() < 3)
"""


@pytest.mark.parametrize("shut", ["", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_files_that_are_closed_give_their_numbers_to_nobody(shut: str) -> None:
    """A fork has its own thread, and what is said last is written when the process ends."""
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {shut}', sys.executable, PROGRAM],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    said = {"of the parent", "of the child", "last words", "printed"}
    assert set(ended.stderr.splitlines()) == (set() if "2" in shut else said)
