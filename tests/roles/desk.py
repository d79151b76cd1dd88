"""One role of a simulated cluster that a test talks to: what it is told, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from epd.messages import Address, Heartbeat, Join, LinkEcho, LinkProbe, Message
from epd.sim.cluster import Settings
from epd.transport.base import Buffer, Received
from tests.roles.simulated import DEFAULTS, Simulated, simulated

GOES_OUT = (Heartbeat, Join, LinkEcho, LinkProbe)  # it stays a member


class Desk:
    """`said`: what it says, to whom; none of it goes out."""

    def __init__(self, cluster: Simulated, name: str, role: Any) -> None:
        self.cluster, self.name, self.role = cluster, name, role
        self.actor = cluster.node(name).actor
        self.said: list[tuple[str, Message]] = []
        self._send = self.actor.send

    def do(self, call: Any, *args: Any) -> None:
        """Call as the process would, in a turn of the loop."""
        context = self.cluster.node(self.name).process.context
        self.cluster.world.loop.call_soon(call, *args, context=context)
        self.cluster.pass_time(0.0)

    def tell(self, method: str, message: Message, source: str, *payloads: bytes) -> list[Message]:
        """What the first life of `source` says to it; all that it says then."""
        self.said.clear()
        self.do(getattr(self.role, method), Received(source, 1, message, payloads))
        return self.words()

    def words(self) -> list[Message]:
        return [message for _, message in self.said]

    def send(self, to: Address | str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        if isinstance(message, GOES_OUT):
            return self._send(to, message, payloads)
        self.said.append((to if isinstance(to, str) else to.instance_id, message))
        return True


@contextmanager
def desk(topology: str, name: str, role: str, settings: Settings = DEFAULTS) -> Iterator[Desk]:
    """`role`: an attribute of the gateway or the instance of this name."""
    with simulated(topology, settings) as cluster:
        node = cluster.node(name)
        made = Desk(cluster, name, getattr(node.gateway or node.instance, role))
        with mock.patch.object(made.actor, "send", made.send):
            yield made
