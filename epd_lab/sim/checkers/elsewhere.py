"""An encoder that is lost, or silent, costs its images, and nothing else.

An image goes to another encoder only if prefill has reported that its rows do not come, or the
gateway has just learnt that its encoder is lost or silent.  The rows must not have come: those of
the same prompt that are there stay.  A second encoder is asked only if prefill has reported late
rows, at most once for each report, and for a share of all images.  An attempt is not given up for
an image while there is an encoder to which it has not been sent.  If another may be dead of it,
only one that has it at hand counts.  An image that was sent `timing.max_attempts` times, hedges
included, may end its attempt.  Nor is an attempt given up for lack of a room before prefill has
asked again, and each question was answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from epd.fsm import embedding, generation, instance, link
from epd.fsm.kernel import Event, Machine, State
from epd.keys import RoomKey
from epd.messages import AbortRequest, Address, Message, RoomAdded, RoomWanted
from epd.roles.compose import Gateway
from epd.scheduling.deaths import MAX_DEATHS
from epd.scheduling.hedging import BURST
from epd.transport.base import Received
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess

_LOST = (instance.HeartbeatsEnded, instance.EpochReplaced, instance.LeftReceived)
Image = tuple[str, int, int]  # generation, attempt, index


@dataclass(frozen=True, slots=True)
class RoomQuestion:
    """That a gateway has received."""

    gateway: SimProcess
    asker: Address


class Elsewhere(Checker):
    name = "elsewhere"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._wanted: dict[Image, RoomWanted] = {}
        self._heard: tuple[float, RoomWanted] | None = None  # what was heard last, and when
        self._max_attempts = context.cluster.settings.timing.max_attempts
        world = context.world
        world.watch(self._moved, generation.ImageMoved)
        world.watch(self._failed, generation.AttemptFailed)
        world.watch(self._encoder_failed, link.EchoMissed, link.PeerForgotten, *_LOST)
        self._gateways: set[str] = set()  # lives that have sent images: each has a budget
        self._avoided: dict[str, frozenset[str]] = {}  # when the attempt began, by generation
        self._late: dict[Image, RoomWanted] = {}
        self._num_sent = self._num_hedged = 0  # images, by all gateways
        self._num_further: Counter[Image] = Counter()  # rooms behind its first
        world.watch(self._placed, generation.Placed)
        world.watch(self._hedged, generation.ImageHedged)
        self._failing_s: dict[str, float] = {}  # by gateway: when it learnt last that one fails
        world.network.on_hearing.append(self._hear)
        self._asked_s: dict[Image, float] = {}
        self._unanswered: dict[Image, RoomQuestion] = {}
        world.watch(self._no_room_came, embedding.NoRoomCame)
        world.network.on_message.append(self._say)

    def _hear(self, process: SimProcess, received: Received) -> None:
        message = received.message
        if isinstance(message, RoomWanted):
            key = message.request_id, message.attempt, message.index
            if message.failure is None:
                self._late[key] = message
                return
            self._heard = self.world.loop.now_s, message
            self._wanted[key] = message
            asker = Address(received.source, received.epoch, "")
            self._unanswered[key] = RoomQuestion(process, asker)

    def _say(self, source: str, target: str, message: Message) -> None:
        if isinstance(message, AbortRequest):
            attempt = message.request_id, message.attempt
            for key, question in list(self._unanswered.items()):
                if key[:2] == attempt and question.asker.instance_id == target:
                    del self._unanswered[key]
        if isinstance(message, RoomWanted | RoomAdded):
            key = message.request_id, message.attempt, message.index
            if isinstance(message, RoomAdded):
                self._unanswered.pop(key, None)
            elif message.failure is not None:
                self._asked_s[key] = self.world.loop.now_s

    def _no_room_came(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        """Each waiter's room was asked for, and each question was answered."""
        assert isinstance(machine, embedding.Embedding)
        now_s, timing = self.world.loop.now_s, self.context.cluster.settings.timing
        bound_s = timing.accept_timeout_s
        for want in machine.waiters.values():
            room = RoomKey.of(want.item.room)
            assert room is not None
            assert room.item is not None
            key = room.request_id, room.attempt, room.item
            if want.stands_for or key not in self._asked_s:
                continue
            if now_s - self._asked_s[key] > bound_s / 2 and process.resumed_s < now_s - bound_s:
                self.violate(f"{want.item.room}: nobody has asked again for another room")
            if self._is_open(key):
                self.violate(f"{want.item.room}: another room was asked for, and no answer given")

    def _is_open(self, key: Image) -> bool:
        """Whether a gateway still has a question to answer: with a room, or that it is over.

        A new gateway cannot answer who has not joined it yet.
        """
        if (question := self._unanswered.get(key)) is None or not question.gateway.runs:
            return False
        gateway = self.context.cluster.nodes[question.gateway.name].gateway
        assert gateway is not None
        return gateway.registry.is_present(question.asker.instance_id, question.asker.epoch)

    def _placed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(machine, generation.Generation):
            self._gateways.add(process.name)
            self._num_sent += len(machine.prompt.items)
            self._avoided[machine.key] = frozenset(machine.avoided)

    def _hedged(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        assert isinstance(machine, generation.Generation)
        key = machine.key, machine.attempt, event.index
        self._num_further[key] += 1
        late = self._late.pop(key, None)
        which = f"image {event.index} of {machine.key}/{machine.attempt}"
        if late is None:
            self.violate(f"{which} goes to a second encoder, and nobody has said that it is late")
        elif event.encoder == late.encoder:
            self.violate(f"{which}: {event.encoder} is late, and is asked again")
        self._num_hedged += 1
        share = self.context.cluster.settings.limits.max_hedged_share
        if self._num_hedged > len(self._gateways) * BURST + share * self._num_sent:
            self.violate(
                f"{self._num_hedged} of {self._num_sent} images were hedged, and the budget is "
                f"{BURST} and {share:g} of them"
            )

    def _moved(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        assert isinstance(machine, generation.Generation)
        key = machine.key, machine.attempt, event.index
        self._num_further[key] += 1
        wanted = self._wanted.pop(key, None)
        if wanted is None and self._failing_s.get(process.name) == self.world.loop.now_s:
            return
        if wanted is None:
            self.violate(
                f"image {event.index} of {machine.key}/{machine.attempt} is encoded again, and "
                "nobody has asked for that"
            )
        elif event.encoder == wanted.encoder:
            self.violate(f"{machine.key}/{machine.attempt}: {event.encoder} is asked again")

    def _encoder_failed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if target in (link.S.UNREACHABLE, link.S.OVER) or isinstance(event, _LOST):
            self._failing_s[process.name] = self.world.loop.now_s

    def _failed(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        if not isinstance(machine, generation.Generation) or self._heard is None:
            return
        heard_s, wanted = self._heard
        is_why = (wanted.request_id, wanted.attempt) == (machine.key, machine.attempt)
        is_why = is_why and event.failure == wanted.failure  # and not of what comes behind it
        if is_why and heard_s == self.world.loop.now_s and self._may_move(process, machine, wanted):
            self.violate(
                f"{machine.key}/{machine.attempt} is given up for its image {wanted.index}, and "
                "there is another encoder"
            )

    def _may_move(
        self, process: SimProcess, machine: generation.Generation, wanted: RoomWanted
    ) -> bool:
        node = self.context.cluster.nodes[process.name]
        gateway = node.gateway
        assert gateway is not None
        takers = {i.info.address.instance_id: i for i in gateway.registry.takers()}
        prefill = takers.get(machine.placement.prefill.instance_id)
        silent = {*gateway.links.silent(), *(prefill.load.silent_peers if prefill else ())}
        others = [
            name
            for name, taker in takers.items()
            if "encode" in taker.info.roles
            and taker.info.address != wanted.encoder
            and name not in silent | self._avoided[machine.key]
            and machine.placement.prefill.instance_id not in taker.load.silent_peers
            and _may_take(gateway, machine.prompt.items[wanted.index].mm_hash, taker.info.address)
        ]
        key = machine.key, machine.attempt, wanted.index
        is_used_up = self._num_further[key] + 1 >= self._max_attempts
        return prefill is not None and bool(others) and not is_used_up


def _may_take(gateway: Gateway, mm_hash: str, encoder: Address) -> bool:
    """Whether no third life is at stake, where one has died of it, or does not answer with it."""
    deaths, silent = gateway.dispatcher.suspects.deaths, gateway.links.silent()
    holders = set(deaths.holders(mm_hash))
    doubtful = {life for life in holders if life[0] in silent or gateway.registry.is_silent(*life)}
    doubtful.update(deaths.lives(mm_hash))
    has_it = (encoder.instance_id, encoder.epoch) in holders
    return not doubtful or has_it or len(doubtful | holders) < MAX_DEATHS
