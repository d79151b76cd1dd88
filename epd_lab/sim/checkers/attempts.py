"""Nothing is tried again without a cause, nor later than it may be, nor where it has just failed.

An attempt is given up for a message of its instances about itself, for the loss of one that it
needs, for an encoder without an answer, or after silence.  The next one goes where none of its
generation has failed, if there is a place, at once or after the pause of its number.  No attempt
needs a lost instance any more: from a loss to the next attempt it takes until the loss is noticed
(`durations` bounds that) and that pause.

A load of rows goes over to another room only when the room before it is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from epd.failure import FailureKind
from epd.fsm import embedding, generation, incoming, instance, link
from epd.fsm.kernel import Event, Machine, State
from epd.messages import Address, EncodeRejected, RequestFailed, RoomWanted
from epd.transport.base import Received
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.checkers.durations import LATE_S, entered_s
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.lives import Node

Life = tuple[str, int]
EXACT_S = 1e-6  # of sums of times
_OPEN = (generation.S.PLACED, generation.S.STREAMING)
_WAITING = (incoming.S.PENDING, incoming.S.RESERVED)
_FAILED = (generation.AttemptFailed, generation.AttemptTimedOut, generation.TokensMissed)
_LOST = (
    instance.HeartbeatsEnded, instance.EpochReplaced, instance.LeftReceived, instance.GivenUp,
)  # fmt: skip
_LOADS = (embedding.LoadFailed, embedding.LoadLost, embedding.LoadTimedOut, embedding.EncoderLost)


def _life(address: Address) -> Life:
    return address.instance_id, address.epoch


def _needed(machine: generation.Generation) -> list[Address]:
    """Whose loss ends the attempt: after its first token it needs no prefill."""
    placement = machine.placement
    if machine.prompt.stage == "encode":
        return list(placement.encoders)
    says = machine.token_ids_of_attempt
    return [placement.decode] if says else [placement.prefill, placement.decode]


class Attempts(Checker):
    name = "attempts"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timing = context.cluster.settings.timing
        self._said: defaultdict[tuple[str, int], set[str]] = defaultdict(set)  # who failed it
        self._asked: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        """For rooms in place of those of these encoders: when, last."""
        self._blamed: defaultdict[str, set[str]] = defaultdict(set)  # by generation
        self._lost: defaultdict[str, set[Life]] = defaultdict(set)  # by gateway
        self._given_up: dict[str, dict[str, float]] = defaultdict(dict)  # by process: peer, when
        world = context.world
        world.watch(self._given_up_on, link.EchoMissed, link.PeerForgotten)
        world.watch(self._lost_at, *_LOST)
        world.watch(self._failed, *_FAILED)
        world.watch(self._placed, generation.Placed)
        world.watch(self._loads_again, *_LOADS)
        world.network.on_hearing.append(self._told)
        world.loop.on_idle.append(self._look)

    # --- what is known ----------------------------------------------------------------------------

    def _told(self, process: SimProcess, received: Received) -> None:
        """A message that the gateway has received: one that is lost or late blames no instance.  Of
        the lost, their loss is enough."""
        message, source = received.message, received.source
        if not isinstance(message, RequestFailed | EncodeRejected | RoomWanted):
            return
        if (source, received.epoch) in self._lost[process.name]:
            return
        if isinstance(message, RoomWanted):
            asked = self._asked[message.request_id, message.attempt]
            asked[message.encoder.instance_id] = self.world.loop.now_s
            return
        said = self._said[message.request_id, message.attempt]
        failure = message.failure
        if failure.kind is FailureKind.TRANSFER:
            said.add(source)
        said.add("" if failure.kind is FailureKind.ABSENT else failure.culprit or source)

    def _lost_at(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(machine, instance.Instance):
            self._lost[process.name].add(_life(machine.info.address))

    def _given_up_on(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if target in (link.S.UNREACHABLE, link.S.OVER):
            self._given_up[process.name][machine.key] = self.world.loop.now_s

    # --- an attempt ends --------------------------------------------------------------------------

    def _failed(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        if not isinstance(machine, generation.Generation) or source not in _OPEN:
            return
        blamed = self._causes(process, machine, event)
        if blamed is None:
            self.violate(f"{machine.key}/{machine.attempt} is given up for nothing: {event}")
        else:
            self._blamed[machine.key] |= blamed

    def _causes(
        self, process: SimProcess, machine: generation.Generation, event: Any
    ) -> set[str] | None:
        """Where it failed; None: nowhere.

        The first cause ends the attempt in its own turn, so there is one: a message, a noticed
        loss, or an instance that was given up just now.
        """
        placement = machine.placement
        if isinstance(event, generation.AttemptFailed):
            asked = self._asked[machine.key, machine.attempt]
            there = {"", *asked, *placement.instances()}  # images may have left encoders
            if said := self._said[machine.key, machine.attempt] & there:
                return said - {""}
            if lost := {a.instance_id for a in _needed(machine) if self._is_lost(process, a)}:
                return lost
            if event.failure.reason.endswith("takes no messages") and not self.context.undisturbed:
                return {placement.prefill.instance_id}
            given_up, now_s = self._given_up[process.name], self.world.loop.now_s
            if now := {name for name, asked_s in asked.items() if asked_s == now_s}:
                return now  # and there is no other one
            silent = {a.instance_id for a in placement.encoders}
            silent = {name for name in silent if given_up.get(name) == now_s}
            return silent if silent and event.failure.kind is FailureKind.LOST else None
        if self.context.undisturbed:
            return None
        if isinstance(event, generation.TokensMissed):
            return set()
        if machine.accepted or machine.token_ids_of_attempt:
            return set(placement.instances())
        waited_s = machine._story[-1][0] - (entered_s(machine) or 0.0)
        is_due = waited_s >= self._timing.accept_timeout_s - LATE_S
        return {_needed(machine)[0].instance_id} if is_due else None

    def _is_lost(self, process: SimProcess, address: Address) -> bool:
        return _life(address) in self._lost[process.name]

    # --- the next one -----------------------------------------------------------------------------

    def _placed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        unplaced = (generation.S.MIGRATING, generation.S.AWAITING_TOPOLOGY)
        if not isinstance(machine, generation.Generation) or source not in unplaced:
            return
        node = self.context.cluster.nodes[process.name]
        for text in self._elsewhere(node, machine):
            self.violate(f"{machine.key}/{machine.attempt} {text}")
        since_s = entered_s(machine)
        waited_s = machine._story[-1][0] - since_s if since_s is not None else 0.0
        has_looked = source is generation.S.AWAITING_TOPOLOGY
        pause_s = self._timing.retry_interval_s * (machine.attempt - 2)
        has_run = process.resumed_s < self.world.loop.now_s - waited_s
        if waited_s < pause_s - EXACT_S and not has_looked:
            self.violate(f"{machine.key}/{machine.attempt} is placed within its pause: {pause_s} s")
        if waited_s > pause_s + LATE_S and has_run and not has_looked:
            self.violate(
                f"{machine.key}/{machine.attempt} is placed {waited_s:.3f} s after the attempt "
                f"before it has failed; its pause is {pause_s:g} s"
            )

    def _elsewhere(self, node: Node, machine: generation.Generation) -> Iterator[str]:
        assert node.gateway is not None
        takers = {i.info.address.instance_id: i.info.roles for i in node.gateway.registry.takers()}
        silent, blamed = node.gateway.links.silent(), self._blamed[machine.key]
        encodes = {name for name, roles in takers.items() if "encode" in roles}
        placement = machine.placement
        if machine.prompt.items and not encodes:
            return  # who finds rows is the only choice
        chosen = [("prefill", placement.prefill), ("decode", placement.decode)]
        chosen += [("encode", a) for a in placement.encoders if a.instance_id in encodes]
        for role, address in chosen:
            if address.instance_id not in blamed:
                continue
            others = [n for n, r in takers.items() if role in r and n not in {*blamed, *silent}]
            if others:
                yield f"goes to {address.instance_id} again, where it failed, not to {others[0]}"

    def _loads_again(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, embedding.Embedding) or target is not embedding.S.REQUESTED:
            return
        rooms = self.context.cluster.nodes[process.name].instance
        assert rooms is not None
        for room in sorted(machine.tried - {machine.room}):
            before = rooms.incoming.find(room)
            if before is not None and before.state in _WAITING:
                self.violate(f"{process.name}: {machine.room} is loaded, and so is {room}")

    # --- what is lost -----------------------------------------------------------------------------

    def _look(self) -> None:
        """A loss reaches all whom it touches in the turn in which it is learnt."""
        for node in self.context.cluster.living():
            if node.process.stalled or node.actor.closing:
                continue
            if node.gateway is not None and self._lost[node.process.name]:
                for machine in node.gateway.role._open.values():
                    if machine.state in _OPEN:
                        self._needs(node.process, machine)
            if node.instance is not None and node.actor.lost:
                for room in node.instance.incoming._rooms.values():
                    if room.state in _WAITING and _life(room.peer) in node.actor.lost:
                        self.violate(f"{node.process.name}: {room.key} waits for {room.peer}, lost")

    def _needs(self, process: SimProcess, machine: generation.Generation) -> None:
        for address in _needed(machine):
            if self._is_lost(process, address):
                self.violate(f"{machine.key}/{machine.attempt} goes on without {address}, lost")
