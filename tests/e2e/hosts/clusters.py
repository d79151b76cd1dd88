"""A cluster on two hosts: as README.md says it, one command on each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd.transport.bus.curve import ClusterKey
from tests.e2e.hosts.network import Cable, Host, two_hosts
from tests.e2e.server import READY_S, Command, Server, wait_for
from tests.e2e.streams import PATIENT

PORT = 7000  # of the gateway's endpoint, on the cable


class Cluster:
    """Of two parts of a topology, both with the same flags; a has the gateway."""

    def __init__(self, cable: Cable, parts: tuple[str, str], key: Path, *flags: str) -> None:
        self.cable = cable
        self.a, self.b = cable.hosts
        self.flags = ("--cluster-key", str(key), *flags)
        self._part_of_b = parts[1]
        endpoint = f"tcp://{self.a.address}:{PORT}"
        self._join = ("--join", endpoint, "--threads", "1", *self.flags)
        listen = ("--listen", endpoint)
        self.server = Server(parts[0], *listen, *self.flags, on=self.a, **PATIENT)
        self.commands: list[Command] = [self.server]
        self.other = self.join_from(self.b)

    def join_from(self, host: Host, *what: str) -> Command:
        """`what`: to start there; the part of host b, which may have been killed with it."""
        what = what or ("--topology", self._part_of_b)
        listen = ("--listen", f"tcp://{host.address}:*")
        self.commands.append(Command("run", *what, *listen, *self._join, on=host))
        return self.commands[-1]

    def host_of(self, instance: str) -> Host:
        return self.b if instance.startswith(f"{self.b.name}-") else self.a

    def wait_ready(self, count: int) -> None:
        """Until so many instances are healthy."""

        def healthy() -> bool:
            entries = self.server.instances().values()
            return sum(entry["state"] == "HEALTHY" for entry in entries) == count

        self.server.wait_ready()
        wait_for(healthy, READY_S, f"{count} instances are healthy")

    def stop(self) -> None:
        """Both commands, asked to end, leave nothing behind."""
        self.server.check_all_returned()
        for command in (self.other, self.server):
            assert command.stop() == 0, command.text
            assert "Traceback" not in command.text, command.text


@contextlib.contextmanager
def cluster(
    parts: tuple[str, str], directory: Path, *flags: str, **hosts: Any
) -> Iterator[Cluster]:
    """At the end nothing may be in use and nothing may be left of it.

    `hosts`: of `two_hosts`.
    """
    key = directory / "key.json"
    ClusterKey.generate().save(str(key))
    with two_hosts(**hosts) as cable:
        made = Cluster(cable, parts, key, *flags)
        try:
            yield made
            made.stop()
        finally:
            for command in made.commands:
                command.discard()
