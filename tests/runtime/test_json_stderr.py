"""With --log-json all that reaches stderr is one JSON object per line, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from epd.runtime.json_stderr import TRACEBACK, Objects

OF_LOG = b'{"at_s": 1.0, "text": "fine"}'


def taken(*lines: bytes) -> list[Any]:
    objects = Objects()
    found = [one for line in lines for one in objects.take(line)]
    return [json.loads(one) for one in (*found, *objects.rest())]


def test_what_is_an_object_goes_on_as_it_is_and_all_else_is_the_text_of_one() -> None:
    others = [b"epd: no such model", b"[1, 2]", b'"text"', b"null", b"{torn", b"\xff", b"NaN", b"1"]
    others += [b'{"a": NaN}', b"[" * 50_000]
    found = taken(OF_LOG, *others, b"", b"  ")
    assert found[0] == {"at_s": 1.0, "text": "fine"}
    assert [one["text"] for one in found[1:]] == [
        other.decode(errors="backslashreplace") for other in others
    ]
    assert [one["level"] for one in found[1:]] == ["error"] + ["warning"] * (len(others) - 1)


def test_a_traceback_is_one_line_also_among_those_of_others() -> None:
    begin, first, second = TRACEBACK.encode(), b'  File "a.py", line 1', b"    raise"
    one, other = taken(begin, first, OF_LOG, second, b"ValueError: no")
    assert one["text"] == "fine" and (other["level"], other["text"]) == ("error", "ValueError: no")
    assert other["traceback"].splitlines() == [
        TRACEBACK,
        first.decode(),
        "    raise",
        other["text"],
    ]
    torn, after = taken(begin, first, begin, second, b"KeyError: 1", b"")
    assert torn["text"].endswith("line 1") and after["text"] == "KeyError: 1"
    (left,) = taken(begin, first)
    assert left["level"] == "error"


EVERYBODY = """
import os, subprocess, sys, threading, warnings
from epd.runtime import json_stderr, lines
json_stderr.begin()
warnings.warn("of Python")
os.write(2, b"of a library in C")
os.write(2, b", in two parts\\n" + b"x" * 200_000 + b"\\n")
subprocess.run([sys.executable, "-c", "1 / 0"])
one = threading.Thread(target=lambda: [][0])
one.start()
one.join()
lines.say("of the console")
lines.flush()
print("the last word", end="", file=sys.stderr)
"""


def test_of_a_process_and_of_those_that_it_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERYBODY], capture_output=True, text=True, timeout=60, check=True
    )
    found = [json.loads(line) for line in done.stderr.splitlines()]
    texts = [one["text"] for one in found]
    for words in (
        "of a library in C, in two parts",
        "ZeroDivisionError: division by zero",
        "IndexError: list index out of range",
        "of the console",
    ):
        assert words in texts
    assert any("UserWarning: of Python" in text for text in texts)
    assert "".join(texts).count("x" * 60_000) == 3, "nothing is lost of a line that is too long"
    assert texts[-1] == "the last word"
    assert sum("traceback" in one for one in found) == 2


def test_the_first_mistake_is_an_object_too() -> None:
    command = [sys.executable, "-m", "epd", "run", "--log-json", "--topolgy", "1epd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert json.loads(line)["level"] == "error" and "did you mean --topology?" in line
