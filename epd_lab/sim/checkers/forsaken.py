"""No attempt waits for a message that no instance will send.

While nothing happens in the whole world and no message is under way, an attempt that its gateway
waits for is open at the instances that have to end it.  If it is not, its end was sent nowhere, or
to the wrong instance; a clock would hide that.  Where messages are lost, that clock is what the
design has: such runs are left out, and what comes after a link was opened anew.
"""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import generation
from epd.keys import attempt_key
from epd.messages import Address
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.lives import Node

_CALLED_OFF = (generation.S.CANCELLING, generation.S.STOPPING)


_LOST = ("links_opened_anew", "message_not_queued")


class Forsaken(Checker):
    name = "forsaken"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._told: set[str] = set()
        if not context.bus_loses:
            context.world.loop.on_idle.append(self._look)

    def _look(self) -> None:
        for node in self.context.cluster.living():
            if node.gateway is None or not self._runs(node) or not self._is_silent():
                continue
            for key, machine in node.gateway.role._open.items():
                for text in self._missed(node, machine):
                    if key not in self._told:
                        self._told.add(key)
                        self.violate(f"{key}/{machine.attempt} {text}")

    def _is_silent(self) -> bool:
        """Whether all messages have arrived."""
        network, nodes = self.world.network, self.context.cluster.nodes.values()
        if network.counters["never heard"]:  # what was kept back when the faults ended
            return False
        if network.withheld or any(k.num_in_flight or k.held for k in network.links.values()):
            return False
        return not any(node.actor.counters[name] for node in nodes for name in _LOST)

    def _runs(self, node: Node) -> bool:
        return not node.process.stalled and not node.actor.closing

    def _missed(self, gateway: Node, machine: generation.Generation) -> Iterator[str]:
        if machine.state in _CALLED_OFF:
            addresses = (machine.placement.prefill, machine.placement.decode)
            asked = [a for a in addresses if a.instance_id in machine.unconfirmed]
            if asked and all(self._at(gateway, address) for address in asked):
                yield f"is called off at {sorted(machine.unconfirmed)}, who do not confirm it"
        elif machine.state in (generation.S.PLACED, generation.S.STREAMING):
            if machine.prompt.stage == "encode":
                yield from self._images(gateway, machine)
            else:
                yield from self._request(gateway, machine)

    def _at(self, gateway: Node, address: Address) -> Node | None:
        """The life that the attempt was sent to, if it is there to answer."""
        node = self.context.cluster.node(address.instance_id)
        is_it = node is not None and node.process.epoch == address.epoch and self._runs(node)
        return node if is_it and not gateway.actor.is_lost(address) else None

    def _request(self, gateway: Node, machine: generation.Generation) -> Iterator[str]:
        placement = machine.placement
        keys = [attempt_key(machine.key, n) for n in (machine.attempt, machine.former)]
        nodes = [self._at(gateway, a) for a in (placement.prefill, placement.decode)]
        for node in nodes:
            if node is None or node.instance is None or node.instance.requests is None:
                return  # its loss will be told
            known = [node.instance.requests.get(key) for key in keys]
            if any(one is not None and not one.ended_for_client for one in known):
                return
        yield f"is waited for, and has ended at {placement.prefill} and {placement.decode}"

    def _images(self, gateway: Node, machine: generation.Generation) -> Iterator[str]:
        assert gateway.gateway is not None
        offer = gateway.gateway.role._dispatcher.offers._offers.get(machine.key)
        for room, image in (offer.images if offer is not None else {}).items():
            encoder = image.encoder
            node = self._at(gateway, encoder)
            if node is None or node.instance is None or node.instance.encode is None:
                continue
            if room not in node.instance.encode._askers:
                yield f"waits for {room}, which {encoder} does not have"
