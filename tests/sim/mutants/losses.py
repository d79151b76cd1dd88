"""Bugs of what is lost and left put back: attempts, receivers, loads that nobody wants any more."""

from __future__ import annotations

from typing import Any

from epd.engine.base import StepFailure
from epd.frontend import Refused, TimeLimits
from epd.fsm import embedding, encoding, generation, incoming, outgoing, request
from epd.fsm.request import note_late
from epd.fsm.room import PeerLost, keep_failure, note_lost
from epd.messages import Grant, TokenChunk
from epd.roles.base import Actor
from epd.roles.encode.row_producer import RowProducer
from epd.roles.gateway.role import GatewayRole
from epd.roles.gateway.stream import Stream
from epd.roles.incoming import IncomingRooms
from epd.roles.steps.requests import Requests
from epd.roles.steps.step_loop import StepLoop
from epd.scheduling.prefix_keys import PrefixKeys
from epd.transport.base import Received
from tests.sim.mutants.planting import Planted, mutant, patched, row, several
from tests.sim.mutants.recovery import the_end_of_its_time_is_an_error

T, G = outgoing.S, generation.S


@mutant
def a_lost_attempt_is_an_error() -> Planted:
    """F19, F20, F55: who loses an instance is told so, instead of being served elsewhere."""
    do = (generation.Do.ABORT_ATTEMPT, generation.Do.ANSWER_ERROR, generation.Do.CLOSE)
    event, note = generation.AttemptFailed, generation.note_failure
    states = (G.PLACED, G.STREAMING)
    return several(*(row(generation.TABLE, state, event, G.FAILED, do, note) for state in states))


@mutant
def copies_of_tokens_are_news() -> Planted:
    """F20: a message that came twice is said twice."""
    take = GatewayRole._take

    def uncounted(self: GatewayRole, machine: generation.Generation, chunk: TokenChunk) -> None:
        have = len(machine.token_ids)
        if 0 < chunk.start < have:
            ends = chunk.finish_reason
            chunk = TokenChunk(
                request_id=chunk.request_id,
                attempt=chunk.attempt,
                start=have,
                token_ids=chunk.token_ids,
                finish_reason=ends,
                logprobs=(),
            )
        take(self, machine, chunk)

    return patched(GatewayRole, "_take", uncounted)


@mutant
def who_is_gone_is_written_for() -> Planted:
    """F3, F6: what was meant for a dead receiver is kept for it."""
    do = (outgoing.Do.CONCLUDE_FAILED,)
    return several(
        row(outgoing.TABLE, T.PARKED, PeerLost, T.FAILED, do, note_lost),
        row(outgoing.TABLE, T.WRITTEN, PeerLost, T.FAILED, do, note_lost),
        row(outgoing.TABLE, T.CANCEL_PENDING, outgoing.WriteRefused, T.CANCELLED, ()),
    )


@mutant
def a_refused_write_keeps_its_source() -> Planted:
    """F8, F14: a write that failed for certain is treated as one in doubt that nobody settles."""
    do = (outgoing.Do.SEND_ABORT, outgoing.Do.CONCLUDE_FAILED)
    return several(
        row(outgoing.TABLE, T.WRITING, outgoing.WriteRefused, T.FAILED, do, outgoing.keep_refusal),
        row(
            outgoing.TABLE, T.STREAMING, outgoing.WriteRefused, T.FAILED, do, outgoing.keep_refusal
        ),
    )


@mutant
def acknowledged_rows_are_kept() -> Planted:
    """What a receiver has, and has said so, is held for it for ever."""
    do = (outgoing.Do.CONCLUDE_DELIVERED,)
    return row(outgoing.TABLE, T.WRITTEN, outgoing.CommitAcked, T.DELIVERED, do)


@mutant
def who_leaves_does_not_wait_for_its_write() -> Planted:
    """F6, F43: who leaves while its KV is being written says that it is over before it is."""
    do, state = (outgoing.Do.SEND_ABORT,), T.CANCEL_PENDING
    return row(outgoing.TABLE, T.STREAMING, outgoing.SourceFailed, state, do, keep_failure)


@mutant
def what_was_abandoned_stays_so() -> Planted:
    """F22: who asks for an image that nobody wanted any more is not served by its encoding."""
    table = encoding.Encoding.table
    return several(
        row(table, encoding.S.ABANDONED, encoding.Requested, None),
        row(embedding.Embedding.table, embedding.S.ABANDONED, embedding.Wanted, None),
    )


@mutant
def a_late_answer_is_taken_back() -> Planted:
    """F15: neither an instance nor the gateway gives out what there is when its time is over."""
    do = request.Do
    effects = (do.DEQUEUE, do.SEND_FAILURE, do.ARM_GRACE)
    state, event, target = request.S.DECODING, request.DeadlinePassed, request.S.ABORTING
    return several(
        the_end_of_its_time_is_an_error(),
        row(request.Request.table, state, event, target, effects, note_late),
    )


@mutant
def the_full_say_nothing() -> Planted:
    """F39: who finds the gateway full is dropped without a message."""
    admit = GatewayRole.admit

    def silently(self: GatewayRole, limits: TimeLimits | None = None) -> Stream:
        try:
            return admit(self, limits)
        except Refused:
            nothing: Any = None
            return Stream("", lambda why, reason: None, lambda: nothing, lambda: nothing)

    return patched(GatewayRole, "admit", silently)


@mutant
def messages_wait_for_the_ring() -> Planted:
    """F4, F18: who waits for a slot hears nothing meanwhile, not even what would free one."""
    lease, stage, deliver = RowProducer.lease, RowProducer.stage, Actor.deliver
    unheard: dict[Actor, tuple[str, list[Received]]] = {}

    def deaf(self: RowProducer, room: outgoing.Outgoing) -> bool:
        waits = lease(self, room)
        if self.ring is not None and self.ring.waits(room.key):
            unheard.setdefault(self._actor, (room.key, []))
        return waits

    async def hears(self: RowProducer, room: outgoing.Outgoing, grant: Grant) -> Any:
        if unheard.get(self._actor, ("", []))[0] == room.key:
            for received in unheard.pop(self._actor)[1]:
                deliver(self._actor, received)
        return await stage(self, room, grant)

    def later(self: Actor, received: Received) -> None:
        if self in unheard:
            unheard[self][1].append(received)
        else:
            deliver(self, received)

    return several(
        patched(RowProducer, "lease", deaf),
        patched(RowProducer, "stage", hears),
        patched(Actor, "deliver", later),
    )


@mutant
def decode_waits_for_what_arrives() -> Planted:
    """F27: while KV is being received, nobody's next token is computed."""
    plan = Requests.plan

    def only_when_nothing_comes(self: Requests, *, alone: bool) -> Any:
        roles = (role for role in self.actor.components if isinstance(role, IncomingRooms))
        rooms = next(roles)._rooms.values()
        receives = any(room.state is incoming.S.RESERVED for room in rooms)
        return [] if receives else plan(self, alone=alone)

    return patched(Requests, "plan", only_when_nothing_comes)


@mutant
def a_failed_step_is_the_last() -> Planted:
    """F14: what a step raises ends the loop that computes steps."""
    settle = StepLoop._settle

    def and_out(self: StepLoop, step: Any) -> None:
        settle(self, step)
        if step.result.exception() is not None or any(
            isinstance(outcome, StepFailure) for outcome in step.result.result().outcomes
        ):
            self._depth = 0

    return patched(StepLoop, "_settle", and_out)


@mutant
def blocks_are_found_by_their_place() -> Planted:
    """F56: the KV of an earlier prompt is taken for this one's, as it lies where this would."""
    key = PrefixKeys._key

    def of_any_text(self: PrefixKeys, start: int, token_ids: Any) -> bytes:
        return key(self, start, ())

    return patched(PrefixKeys, "_key", of_any_text)
