"""People who look at a cluster while it works: the verbs, against real processes."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd.cli.main import main
from epd.cli.start.rundir import cluster_dir
from epd.tiny import SAMPLES
from tests.e2e.client import data_url, post_all, question
from tests.e2e.server import READY_S, Command, Server

ROOT = Path(__file__).parents[3]
IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())


def told(server: Server, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json", "--url", server.base_url]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    return found


def test_a_request_is_found_at_every_process_that_served_it(
    apart: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    (reply,) = asyncio.run(post_all(apart.base_url, [question("What is the total?", IMAGE)]))
    assert reply.status == 200
    names = [one["instance"] for one in told(apart, capsys, "list", "instances")]
    assert names[0] == "gateway" and set(names) == {"gateway", "e0", "p0", "d0"}
    assert told(apart, capsys, "list", "instances", "--older", "1h") == []
    images = {(m["instance"], m["machine"]) for m in told(apart, capsys, "list", "images")}
    assert images >= {("e0", "ENCODING"), ("p0", "EMBEDDING")}
    key = reply.body["id"].partition("-")[2]
    story = told(apart, capsys, "story", key)
    assert {(one["instance"], one["machine"]) for one in story} >= {
        ("gateway", "GENERATION"),
        ("p0", "REQUEST"),
        ("d0", "REQUEST"),
        ("p0", "OUTGOING"),
        ("d0", "INCOMING"),
    }
    assert main(["story", key, "--url", apart.base_url]) == 0
    text = capsys.readouterr().out
    assert f"{key}/1/kv" in text and "FINISHED" in text
    assert main(["story", "nobody", "--url", apart.base_url]) == 1
    assert "no process knows 'nobody'" in capsys.readouterr().err


def test_the_question_of_the_readme(apart: Server) -> None:
    """As it is typed, but that its text comes from a pipe."""
    text = (ROOT / "README.md").read_text()
    command = next(line for line in text.splitlines() if " epd ask " in line)
    question = "What is the total?"
    _, *words = shlex.split(command.replace("http://127.0.0.1:8000", apart.base_url))
    assert question in words
    typed = [sys.executable, *("-" if word == question else word for word in words)]
    done = subprocess.run(
        typed, cwd=ROOT, input=f"{question}\n", capture_output=True, text=True, timeout=READY_S,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "10.85\n", "")


def test_a_worker_under_a_living_name_is_refused_at_both_ends(
    apart: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """F78: it ends with a sentence, the gateway shows why, and the one that lives goes on."""
    before = apart.instances()["e0"]
    gateway = f"ipc://{cluster_dir(apart.port, apart.run_dir)}/gateway.sock"
    twin = Command("run", "--role", "encode", "--id", "e0", "--join", gateway, "--threads", "1")
    try:
        assert twin.wait(READY_S) == 1, twin.text
        rows = [line.split(maxsplit=5) for line in twin.text.splitlines() if line[:3] == "e0 "]
        told = {row[2]: row[5] for row in rows if len(row) == 6}
        assert told["waiting"].startswith("another has the name")
        assert told["refused"].startswith("its name is in use by a living instance")
        assert "--id" in twin.text and "Traceback" not in twin.text
    finally:
        twin.discard()
    assert "join refused" in apart.text
    after = apart.instances()["e0"]
    assert (after["epoch"], after["pid"]) == (before["epoch"], before["pid"])
    assert after["state"] == "HEALTHY"
    assert main(["list", "instances", "--url", apart.base_url]) == 0
    assert "REFUSED" in capsys.readouterr().out
