"""What has ended is remembered: its id is never given again, and late messages find an answer
(F42).

A room is remembered for `tombstone_s`, an attempt at an instance for as long as that lives, and a
commit is acknowledged for ever: its sender holds what it wrote.  An instance that has reported its
end does not begin it afterwards.  `PROMISED` names the answer to each message that may come late;
what counts as ended is what this checker has seen to end.

A gateway has the attempts that it serves: an instance that works on one that was given up gets a
message, also while no other one follows.

Nor is a copy taken for news while what it asks for is open: nobody refuses what it has (`ASKS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from epd.fsm import generation, incoming, outgoing, request
from epd.fsm.kernel import Event, Machine, State
from epd.fsm.room import Room
from epd.keys import RoomKey, attempt_key, request_of
from epd.messages import (
    AbortEncode,
    AbortRequest,
    Address,
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    EncodeAccepted,
    EncodeRejected,
    EncodeRequest,
    Grant,
    KvOffer,
    Message,
    PrefillRequest,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RequestInquiry,
    RoomWanted,
    Tokens,
    TransferAborted,
)
from epd.transport.base import Received
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess

OPENED = (
    request.TextOnly,
    request.EmbeddingsRequired,
    request.KvOffered,
    request.KvInherited,
)
BEGUN = (
    incoming.SlotsLeased,
    outgoing.BytesReady,
    outgoing.PartReady,
    outgoing.GrantReceived,
    outgoing.CancelReceived,
)
_WRITES = (outgoing.S.STREAMING, outgoing.S.WRITING)
PROMISED: dict[type[Message], type[Message]] = {
    CancelTransfer: CancelAck, Commit: CommitAck, Grant: TransferAborted,
    AbortRequest: RequestAborted, PrefillRequest: RequestAborted, KvOffer: CancelTransfer,
    RequestInquiry: RequestFailed, EncodeAccepted: AbortEncode, RequestAccepted: AbortRequest,
    RoomWanted: AbortRequest, Tokens: AbortRequest,
}  # fmt: skip
_AT_WORK = (EncodeAccepted, RequestAccepted, RoomWanted, Tokens)  # what a gateway hears
ASKS: dict[type[Message], type[Message]] = {  # and how that is refused
    EncodeRequest: EncodeRejected,
    PrefillRequest: RequestFailed,
    KvOffer: CancelTransfer,
}
_LOOKED_AT = {*PROMISED, *ASKS}
_SAID = {*PROMISED.values(), *ASKS.values()}
_UNTOLD = (request.KvDelivered, request.AbortReceived)  # it lives on at decode; who asks knows
_NOT_SENT = ("message_not_queued", "message_to_other_epoch", "message_of_other_epoch", "faults")


class Tombstones(Checker):
    name = "tombstones"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._tombstone_s = context.cluster.settings.timing.tombstone_s
        self._requests: dict[tuple[str, str], request.Request] = {}
        self._rooms: dict[tuple[str, str, type[Room]], Room] = {}
        self._generations: dict[tuple[str, str], generation.Generation] = {}
        self._over: set[tuple[str, str]] = set()  # by process: what it said is over
        self._sent: Counter[tuple[str, str, type[Message]]] = Counter()
        context.world.watch(self._opened, *OPENED)
        context.world.watch(self._begun, *BEGUN)
        context.world.watch(self._placed, generation.Placed)
        context.world.network.on_message.append(self._says)
        context.cluster.on_deliver = self._delivered

    # --- ids --------------------------------------------------------------------------------------

    def _opened(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, request.Request):
            return
        name = process.name, machine.key
        if self._requests.setdefault(name, machine) is not machine:
            self.violate(f"{process.name} opens {machine.key} a second time (F42)")
        if name in self._over:
            self.violate(f"{process.name} opens {machine.key}, and has said that it is over (F42)")

    def _placed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(machine, generation.Generation)
        self._generations[process.name, machine.key] = machine

    def _begun(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, Room):
            return
        before = self._rooms.get((process.name, machine.key, type(machine)))
        if before is not machine:
            self._rooms[process.name, machine.key, type(machine)] = machine
            if before is not None and self._remembered(before):
                self.violate(f"{process.name} forgot that {machine.key} was over (F42)")
        is_over = (process.name, machine.key) in self._over
        if is_over and target in _WRITES and source is not target:
            self.violate(f"{process.name} writes {machine.key}, which it called off (F42)")

    def _remembered(self, machine: Room) -> bool:
        """Whether it has ended, and not too long ago."""
        if not machine.terminal:
            return False
        ended = next(entry for entry in machine._story if entry[3] in machine.table.terminal)
        now_s: float = machine._journal.now_s()
        return now_s < float(ended[0]) + self._tombstone_s

    # --- messages ---------------------------------------------------------------------------------

    def _says(self, source: str, target: str, message: Message) -> None:
        process = self.world.processes[source]
        if type(message) in _SAID:
            key = _key_of(message)
            self._sent[process.name, key, type(message)] += 1
            if isinstance(message, RequestAborted | CancelAck):
                self._over.add((process.name, key))

    def _delivered(
        self, process: SimProcess, deliver: Callable[[Received], None], received: Received
    ) -> None:
        """Deliver, and see that a late message is answered in the same turn, and no copy refused.

        A life that is over waits for no answer, and its successor would get it.
        """
        kind = type(received.message)
        if kind not in _LOOKED_AT or received.source == process.instance_id:
            deliver(received)
            return
        sender = Address(received.source, received.epoch, "")
        actor = self.context.cluster.nodes[process.name].actor
        is_owed = actor.admits(received) and not actor.is_lost(sender)
        keys = _keys_of(received.message)
        late = [k for k in keys if is_owed and self._is_late(process, received, k)]
        copies = [k for k in keys if kind in ASKS and self._is_open(process, received.message)]
        before = {key: self._num_said(process, key, kind) for key in keys}
        deliver(received)
        after = {key: self._num_said(process, key, kind) for key in keys}
        for key in late:
            if after[key][0] == before[key][0]:
                what = f"does not answer {kind.__name__} of {key}, which is over"
                self.violate(f"{process.name} {what} (F42)")
        for key in copies:
            if after[key][1] > before[key][1]:
                what = f"refuses a copy of {kind.__name__} of {key}, which it has open"
                self.violate(f"{process.name} {what} (F42)")

    def _num_said(self, process: SimProcess, key: str, kind: type[Message]) -> tuple[int, int]:
        """How many answers to this message it has sent, or could not send, and how many
        refusals."""
        counters = self.context.cluster.nodes[process.name].actor.counters
        answers = self._sent[process.name, key, PROMISED.get(kind, Message)]
        refusals = self._sent[process.name, key, ASKS.get(kind, Message)]
        return answers + sum(counters[name] for name in _NOT_SENT), refusals

    def _is_open(self, process: SimProcess, message: Any) -> bool:
        """Whether what this asks for is at work there already."""
        if isinstance(message, EncodeRequest):
            instance = self.context.cluster.nodes[process.name].instance
            assert instance is not None
            assert instance.encode is not None
            return message.room in instance.encode._askers
        machine = self._requests.get(
            (process.name, attempt_key(message.request_id, message.attempt))
        )
        return machine is not None and not machine.terminal

    def _is_given_up(self, process: SimProcess, key: str) -> bool:
        """Whether this gateway serves nobody with the attempt of this key, or of this room."""
        room = RoomKey.of(key)
        attempt = attempt_key(room.request_id, room.attempt) if room else key
        machine = self._generations.get((process.name, request_of(attempt)))
        read = (machine.attempt, machine.former) if machine is not None else ()
        if machine is None or attempt not in [attempt_key(machine.key, n) for n in read]:
            return True
        return machine.state not in (generation.S.PLACED, generation.S.STREAMING)

    def _is_late(self, process: SimProcess, received: Received, key: str) -> bool:
        message: Any = received.message
        if isinstance(message, _AT_WORK):
            return self._is_given_up(process, key)
        if isinstance(message, AbortRequest | PrefillRequest | KvOffer | RequestInquiry):
            machine = self._requests.get((process.name, key))
            if machine is None or not machine.terminal:
                return False
            is_inquiry = isinstance(message, RequestInquiry)
            return not (is_inquiry and any(entry[2] in _UNTOLD for entry in machine._story))
        end = incoming.Incoming if isinstance(message, Commit) else outgoing.Outgoing
        room = self._rooms.get((process.name, key, end))
        if room is None or not room.terminal:
            return False
        if not isinstance(message, Commit) and not self._remembered(room):
            return False
        delivered = isinstance(message, Grant) and room.state is outgoing.S.DELIVERED
        is_peer = (room.peer.instance_id, room.peer.epoch) == (received.source, received.epoch)
        return is_peer and not delivered


def _key_of(message: Any) -> str:
    """Its room; of a message about an attempt, that."""
    room: str = getattr(message, "room", "")
    return room or attempt_key(message.request_id, message.attempt)


def _keys_of(message: Message) -> list[str]:
    """Of what it asks for an answer."""
    if isinstance(message, Tokens):
        return [_key_of(chunk) for chunk in message.chunks if not chunk.finish_reason]
    return [_key_of(message)]
