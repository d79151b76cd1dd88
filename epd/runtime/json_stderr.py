"""With `--log-json` each line on stderr is a JSON object, whoever writes it.

Theory of operation
-------------------
Not all that reaches stderr is a log line: the console's own words, warnings of Python and its
libraries, a traceback, the last words of a library in C.  So descriptor 2 of the command becomes a
pipe, which every process inherits that it starts.  A thread reads it: an object goes on as it is,
any other line becomes the text of one, and a traceback of Python is one line.  They go on through a
queue of their own, so that whoever reads stderr slowly holds up nobody (fault F69).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator

import msgspec

from epd.runtime import lines
from epd.runtime.logs import json_line

MAX_LINE_NBYTES = 1 << 16
TRACEBACK = "Traceback (most recent call last):"
OF_COMMAND = "epd: "  # how a command begins that fails


class Objects:
    """Lines as they come, to lines that are objects."""

    def __init__(self) -> None:
        self._traceback: list[str] = []  # so far

    def take(self, line: bytes) -> Iterator[str | bytes]:
        if _is_object(line):
            yield line
            return
        text = line.decode(errors="backslashreplace").rstrip()
        if text == TRACEBACK:
            yield from self.rest()
            self._traceback = [text]
        elif self._traceback and line[:1] in (b" ", b"\t"):
            self._traceback.append(text)
        elif self._traceback:
            whole = "\n".join([*self._traceback, text])
            self._traceback = []
            yield json_line("error", "", "stderr", text, {"traceback": whole})
        elif text:
            level = "error" if text.startswith(OF_COMMAND) else "warning"
            yield json_line(level, "", "stderr", text)

    def rest(self) -> Iterator[str]:
        """A traceback whose end did not come."""
        if self._traceback:
            yield json_line("error", "", "stderr", "\n".join(self._traceback))
            self._traceback = []


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def begin() -> None:
    """From now on, and in every process that is started; until this one ends."""
    real = os.dup(lines.STDERR)
    out = lines.Lines(real)
    out.note = lambda lost: json_line(
        "warning", "", "stderr", "lines could not be written", {"lines": lost}
    )
    ours, theirs = os.pipe()
    os.dup2(theirs, lines.STDERR)
    os.close(theirs)
    reading = threading.Thread(target=_pass_on, args=(ours, out), name="json-stderr", daemon=True)
    reading.start()

    def end() -> None:
        lines.flush()
        sys.stderr.flush()
        os.dup2(real, lines.STDERR)
        reading.join(lines.FLUSH_S)  # its end comes when no process holds the pipe
        out.flush()

    atexit.register(end)


def _pass_on(fd: int, out: lines.Lines) -> None:
    objects, rest = Objects(), b""
    while data := os.read(fd, MAX_LINE_NBYTES):
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_NBYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            for one in objects.take(line):
                out.say(one)
    for one in (*objects.take(rest), *objects.rest()):
        out.say(one)
