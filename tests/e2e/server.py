"""Clusters of tests: as users start them, but for a zygote that all of them share (warm.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil

from epd_lab.bench.chaos import process
from epd_lab.bench.chaos.process import (
    COLD,
    READY_S,
    SLOW,
    STOP_S,
    abandoned_segments,
    discarding,
    is_alive,
    wait_for,
)
from epd_lab.bench.chaos.process import (
    ClusterFailed as Failed,
)
from tests.e2e import warm

__all__ = [
    "COLD", "READY_S", "SLOW", "STOP_S", "Command", "Failed", "Server", "abandoned_segments",
    "discarding", "is_alive", "run", "serving", "wait_for",
]  # fmt: skip
WARM = ("-m", "tests.e2e.warm")


class Command(process.Command):
    """The same, sooner."""

    program: ClassVar[tuple[str, ...]] = WARM

    def environment(self, program: tuple[str, ...]) -> dict[str, str]:
        return {warm.ADDRESS: warm.address()} if program == WARM else {}

    def has_mark(self, process: psutil.Process) -> bool:
        """A fork of the shared zygote has the environment of that, and the mark in a file."""
        if process.cmdline()[1:3] == [*WARM] and "--serve" in process.cmdline():
            fds = (os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir())
            return any(fd.startswith(f"/memfd:{self.mark} ") for fd in fds)
        return super().has_mark(process)


class Server(Command, process.ServingCommand):
    """`epd run` with a gateway."""


@contextlib.contextmanager
def serving(topology: str, *flags: str, **settings: Any) -> Iterator[Server]:
    """A ready server; at the end nothing may be in use and nothing may be left of it."""
    server = Server(topology, *flags, **settings)
    try:
        yield server.wait_ready()
        server.check_all_returned()
        assert server.stop() == 0, server.text
        assert "Traceback" not in server.text, server.text
    finally:
        server.discard()


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command that ends by itself; nothing may be left of it."""
    with discarding(Command(*arguments)) as command:
        status = command.wait(READY_S)
        command.check_nothing_left()
        return status, command.text
