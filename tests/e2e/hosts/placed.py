"""A cluster that somebody else's placer has started, as its clients and the kernel see it."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from epd_lab.bench.chaos.hosts import MadeHost
from tests.e2e.client import Reply, post_all, question
from tests.e2e.faults.test_kill import ANSWER, HEALTHY
from tests.e2e.server import READY_S, wait_for

ROOT = Path(__file__).parents[3]
PORT = 8000
LONG = 1500  # tokens


def program(directory: Path) -> Path:
    """Of a directory for the PATH: the command `epd`, as if it was installed."""
    made = directory / "bin" / "epd"
    made.parent.mkdir()
    made.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m epd "$@"\n')
    made.chmod(0o755)
    return made.parent


class Placed:
    """Of three instances.  `head` has the gateway; its processes have EPD_MARK=`mark`."""

    def __init__(self, head: MadeHost, mark: str) -> None:
        self.url = f"http://{head.client_address}:{PORT}"
        self._mark = mark

    def instances(self) -> dict[str, dict[str, Any]]:
        """Of those that serve, if every stage does; else none."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as response:
                told = json.load(response)["instances"]
        except OSError:
            return {}
        return {one["instance"]: one for one in told if one["state"] == "HEALTHY"}

    def wait_ready(self, *but: int) -> dict[str, int]:
        """Their epochs, none of them one of these."""

        def ready() -> dict[str, int]:
            found = {name: one["epoch"] for name, one in self.instances().items()}
            return found if len(found) == 3 and not {*but} & {*found.values()} else {}

        found: dict[str, int] = wait_for(ready, READY_S, "three instances serve")
        return found

    def check_answer(self) -> None:
        (reply,) = asyncio.run(post_all(self.url, [HEALTHY]))
        assert reply.text == ANSWER

    async def end_while_it_answers(self, end: Any, within_s: float) -> Reply:
        """The answer that is open then."""
        body = question("Tell me about it.", max_tokens=LONG, ignore_eos=True)
        answer = asyncio.create_task(post_all(self.url, [body]))
        await asyncio.to_thread(wait_for, self._is_busy, READY_S, "the question is open")
        await asyncio.to_thread(end)
        await asyncio.to_thread(self.wait_gone, within_s)
        return (await answer)[0]

    def _is_busy(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5.0) as response:
            return b"epd_open_requests 1.0" in response.read()

    def wait_gone(self, within_s: float) -> None:
        wait_for(lambda: not self.processes(), within_s, "its processes end")

    def processes(self) -> list[psutil.Process]:
        """Of epd, anywhere."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("EPD_MARK") == self._mark
                words = process.cmdline() if is_ours else ()
                if any(word == "epd" or word.startswith("epd.") for word in words):
                    found.append(process)
            except psutil.Error:
                continue
        return found
