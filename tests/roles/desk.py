"""A role of a simulated cluster that a test talks to: what it is told, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import msgspec

from epd.failure import Failure, FailureKind
from epd.frontend import GenerationUpdate, Stage
from epd.fsm.kernel import Event, Machine, State
from epd.messages import (
    Address,
    Heartbeat,
    Join,
    LinkEcho,
    LinkProbe,
    Message,
    RequestFailed,
    TokenChunk,
    Tokens,
)
from epd.roles.base import Component
from epd.transport.base import Buffer, Received
from epd_lab.sim.cluster import GATEWAY, Settings
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask
from tests.roles.simulated import DEFAULTS, Simulated, simulated

Part = TypeVar("Part", bound=Component[Any])
Kind = TypeVar("Kind", bound=Machine)
GOES_OUT = (Heartbeat, Join, LinkEcho, LinkProbe)  # it stays a member


class Desk:
    """`said`: what it says, to whom; none of it goes out, but for `goes_out`."""

    def __init__(self, cluster: Simulated, name: str, role: Any) -> None:
        self.cluster, self.name, self.role = cluster, name, role
        node = cluster.node(name)
        self.actor = node.actor
        self.whole: Any = node.gateway or node.instance  # that the role is a part of
        self.said: list[tuple[str, Message]] = []
        self.goes_out: tuple[type[Message], ...] = GOES_OUT
        self._send = self.actor.send
        self._seen: dict[tuple[type[Machine], str], Machine] = {}
        cluster.world.watchers.append(self._see)

    def _see(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if process is self.cluster.node(self.name).process:
            self._seen[type(machine), machine.key] = machine

    def machine(self, kind: type[Kind], key: str) -> Kind | None:
        """The last one of this key that an event has reached; None if it is over."""
        found = self._seen.get((kind, key))
        return found if isinstance(found, kind) and not found.terminal else None

    def part(self, kind: type[Part]) -> Part:
        """Of the same process."""
        (found,) = (one for one in self.actor.components if isinstance(one, kind))
        return found

    def fall_silent(self, *names: str, for_s: float = 1.01) -> None:
        """The first lives of these do not answer this process."""
        self.goes_out = ()
        for name in names:
            self.do(self.whole.links.doubt, Address(name, 1, ""))
        self.cluster.pass_time(for_s)

    def do(self, call: Any, *args: Any) -> Any:
        """Call as the process would: as an item of its inbox."""
        result = self.cluster.item(self.name, call, *args)
        loop = self.cluster.world.loop
        assert not loop.escaped, loop.escaped
        return result

    def tell(
        self, method: str, message: Message, source: str, *payloads: bytes, epoch: int = 1
    ) -> list[Message]:
        """What a life of `source` says to it; all that it says then."""
        self.said.clear()
        self.do(getattr(self.role, method), Received(source, epoch, message, payloads))
        return self.messages()

    def messages(self) -> list[Message]:
        return [message for _, message in self.said]

    def send(self, to: Address | str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        if isinstance(message, self.goes_out):
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


TOPOLOGY = "2e2p2d"


class Open:
    """One open generation at the gateway's desk."""

    def __init__(self, at: Desk, stage: Stage = "", *images: Image, **wishes: Any) -> None:
        self.at = at
        placed = tuple((1 + n, image) for n, image in enumerate(images))
        text = wishes.pop("text", (11, 12, 13))
        ask = Ask(1, 0.0, text, placed, **{"max_tokens": 5, **wishes})
        self.prepared = ask.generation(stage)
        self.stream = at.cluster.within(GATEWAY, at.role.submit, self.prepared)
        self.machine = at.role.open_ones()[-1]

    @property
    def key(self) -> str:
        return self.stream.request_id

    @property
    def prefill(self) -> str:
        return str(self.machine.placement.prefill.instance_id)

    @property
    def decode(self) -> str:
        return str(self.machine.placement.decode.instance_id)

    def room(self, index: int) -> str:
        return f"{self.key}/{self.machine.attempt}/{index}"

    def encoder(self, index: int) -> str:
        return str(self.machine.placement.encoders[index].instance_id)

    def tokens(self, start: int, *token_ids: int, **other: Any) -> list[Message]:
        made = TokenChunk(
            request_id=self.key, attempt=self.machine.attempt, start=start, token_ids=token_ids
        )
        chunk = msgspec.structs.replace(made, **other)
        return self.at.tell("on_tokens", Tokens(chunks=(chunk,)), self.decode)

    def fails(self, source: str, kind: str, culprit: str = "", **other: Any) -> list[Message]:
        failure = Failure(FailureKind(kind), "because", culprit)
        made = RequestFailed(request_id=self.key, attempt=self.machine.attempt, failure=failure)
        return self.at.tell("on_failed", msgspec.structs.replace(made, **other), source)

    def updates(self) -> list[GenerationUpdate]:
        found = []
        while (update := self.stream.next_ready()) is not None:
            found.append(update)
        return found

    def sent(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(to, message) for to, message in self.at.said if isinstance(message, kind)]


def gateway(settings: Settings = DEFAULTS) -> Any:
    return desk(TOPOLOGY, GATEWAY, "role", settings)
