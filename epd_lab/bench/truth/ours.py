"""The column of this project alone: its processes, and their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from epd_lab.bench.chaos.process import Command, ServingCommand
from epd_lab.bench.truth.cluster import Skipped, TruthCluster

DTYPE = "float32"


class OurCluster(TruthCluster):
    """E + P + D of this project; `model` None: the bundled one."""

    def __init__(self, topology: str, *flags: str, model: Path | None = None) -> None:
        self.topology, self.model = topology, model
        self._flags, self._commands = flags, list[Command]()
        self.gateway: ServingCommand

    def serving(self, topology: str, *flags: str, model: Path | None = None) -> ServingCommand:
        given = ("--dtype", DTYPE, *flags)
        command = ServingCommand(topology, *given, model=model or self.model)
        self._commands.append(command)
        return command

    def start(self) -> str:
        """Its URL."""
        self.gateway = self.serving(self.topology, *self._flags)
        self.ready("e+pd")
        return self.gateway.base_url

    def ready(self, setup: str) -> None:
        self.gateway.wait_healthy(sum(map(int, filter(str.isdigit, self.topology))))

    def victims(self, role: str) -> Sequence[Callable[[], None]]:
        if role == "pd":
            raise Skipped("its prompts and its answers are computed apart")
        found = [one for one in self.gateway.instances().values() if role in one["roles"]]
        return [partial(os.kill, int(one["pid"]), signal.SIGKILL) for one in found]

    def close(self) -> None:
        for command in reversed(self._commands):
            command.discard()
