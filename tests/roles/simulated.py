"""A simulated cluster that a test of roles drives by hand: started, and stopped where it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from epd.fsm.instance import Instance as Registered
from epd.roles.compose import Gateway, Instance
from epd_lab.sim.client import Clients, Record
from epd_lab.sim.cluster import GATEWAY, Cluster, Settings
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.lives import Node
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World

Args = ParamSpec("Args")
Result = TypeVar("Result")
DEFAULTS = Settings()
TEXT = (11, 12, 13, 14)


class Simulated:
    """`cluster` in its `world`, ready to serve."""

    def __init__(self, topology: str, settings: Settings) -> None:
        self.settings = settings
        self.world = World(1)
        self.cluster = Cluster(self.world, topology, settings)
        self.cluster.start()
        self._clients = Clients(self.cluster, ())
        self.pass_time(1.0)

    def pass_time(self, for_s: float) -> None:
        self.world.loop.run_until(self.world.loop.now_s + for_s)

    def node(self, name: str) -> Node:
        node = self.cluster.node(name)
        assert node is not None
        return node

    def instance(self, name: str) -> Instance:
        instance = self.node(name).instance
        assert instance is not None
        return instance

    @property
    def gateway(self) -> Gateway:
        gateway = self.node(GATEWAY).gateway
        assert gateway is not None
        return gateway

    def registered(self, name: str) -> Registered:
        """The instance as the gateway knows it."""
        known = {one.info.address.instance_id: one for one in self.gateway.registry.instances}
        return known[name]

    def ask(self, *images: Image, text: tuple[int, ...] = TEXT, **wishes: Any) -> Record:
        """A client asks now; the record is what it sees."""
        placed = tuple((1 + n, image) for n, image in enumerate(images))
        ask = Ask(len(self._clients.records), self.world.loop.now_s, text, placed, **wishes)
        return self._clients.add(ask)

    def within(
        self, name: str, call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result:
        """Call as a process would, and let it take what that has put into its inbox."""
        result = self.node(name).process.context.run(call, *args, **kwargs)
        self.pass_time(0.0)
        return result

    def item(self, name: str, call: Callable[..., Result], *args: Any) -> Result:
        """Call as an item of its inbox; raises what that does."""
        results: list[Result] = []
        escaped: list[Exception] = []

        def take() -> None:
            try:
                results.append(call(*args))
            except Exception as error:
                escaped.append(error)

        self.within(name, self.node(name).actor.mailbox.put, "test", take)
        for error in escaped:
            raise error
        return results[0]


@contextmanager
def simulated(topology: str, settings: Settings = DEFAULTS) -> Iterator[Simulated]:
    cluster = Simulated(topology, settings)
    try:
        yield cluster
    finally:
        cluster.world.close()
