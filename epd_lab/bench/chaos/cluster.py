"""A cluster on two hosts: as in README.md, one command on each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd.transport.bus.curve import ClusterKey
from epd_lab.bench.chaos.hosts import HostCable, MadeHost, two_hosts
from epd_lab.bench.chaos.process import Command, ServingCommand

PORT = 7000  # of the gateway's endpoint, on the cable
Kinds = tuple[type[ServingCommand], type[Command]]


class TwoHosts:
    """Of two parts of a topology, both with the same flags; a has the gateway."""

    def __init__(
        self, cable: HostCable, parts: tuple[str, str], key: Path, kinds: Kinds, *flags: str
    ) -> None:
        self.cable = cable
        self.a, self.b = cable.hosts
        self.flags = ("--cluster-key", str(key), *flags)
        self._part_of_b = parts[1]
        endpoint = f"tcp://{self.a.address}:{PORT}"
        self._join = ("--join", endpoint, "--threads", "1", *self.flags)
        listen = ("--listen", endpoint)
        server, self._command = kinds
        self.server = server(parts[0], *listen, *self.flags, on=self.a)
        self.commands: list[Command] = [self.server]
        self.other = self.join_from(self.b)

    def join_from(self, host: MadeHost, *what: str) -> Command:
        """`what`: to start there; the part of host b, which may have been killed with it."""
        what = what or ("--topology", self._part_of_b)
        listen = ("--listen", f"tcp://{host.address}:*")
        self.commands.append(self._command("run", *what, *listen, *self._join, on=host))
        return self.commands[-1]

    def host_of(self, instance: str) -> MadeHost:
        return self.b if instance.startswith(f"{self.b.name}-") else self.a

    def wait_ready(self, count: int) -> None:
        self.server.wait_healthy(count)

    def stop(self) -> None:
        """Both commands, asked to end, leave nothing behind."""
        self.server.check_all_returned()
        for command in (self.other, self.server):
            assert command.stop() == 0, command.text
            assert "Traceback" not in command.text, command.text


@contextlib.contextmanager
def cluster(
    parts: tuple[str, str],
    directory: Path,
    *flags: str,
    kinds: Kinds = (ServingCommand, Command),
    **hosts: Any,
) -> Iterator[TwoHosts]:
    """Discarded afterwards; `stop` is its orderly end.  `hosts`: of `two_hosts`."""
    key = directory / "key.json"
    ClusterKey.generate().save(str(key))
    with two_hosts(**hosts) as cable:
        made = TwoHosts(cable, parts, key, kinds, *flags)
        try:
            yield made
        finally:
            for command in made.commands:
                command.discard()
