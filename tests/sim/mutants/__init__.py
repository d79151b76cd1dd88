"""Bugs of the fault catalogue, put back: patched rows or methods, never a switch in what ships.

`MUTANTS` maps a name to a context manager.  `epd sim mutants` runs each under the drills that name
it (epd_lab/sim/drills/); one that no drill notices is a survivor and fails CI.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from epd.engine.base import Rows
from epd.failure import Failure, FailureKind
from epd.fsm import embedding, encoding, generation, incoming, outgoing, request, room
from epd.fsm.kernel import Event
from epd.messages import KvState, TokenChunk
from epd.roles.base import Actor
from epd.roles.encode.role import EncodeRole
from epd.roles.member import Member
from epd.roles.outgoing import OutgoingRooms
from epd.roles.place import GatewayPlace
from epd.roles.prefill import kv_producer
from epd.roles.steps.requests import Requests
from epd.scheduling.pool import LruCache
from epd.transport.base import Received
from epd_lab.sim.planes.transfer import SimTransferEngine
from tests.sim.mutants import (
    adapters,
    admission,
    answers,
    caches,
    checkers,
    elsewhere,
    faults,
    groups,
    kinds,
    links,
    losses,
    members,
    offers,
    pictures,
    poison,
    recovery,
    scheduling,
    speculation,
    stages,
    states,
    tiers,
    told,
    wedges,
)
from tests.sim.mutants.planting import MUTANTS, Planted, mutant, patched, row, several

__all__ = [
    "MUTANTS",
    "adapters",
    "admission",
    "answers",
    "caches",
    "checkers",
    "elsewhere",
    "faults",
    "groups",
    "kinds",
    "links",
    "losses",
    "members",
    "offers",
    "pictures",
    "poison",
    "recovery",
    "scheduling",
    "speculation",
    "stages",
    "states",
    "tiers",
    "told",
    "wedges",
]

OUT, IN, E, R, C = outgoing.S, incoming.S, embedding.S, request.S, encoding.S
REQUEST = request.Request.table


@mutant
def drop_parked_bytes() -> Planted:
    """F1: bytes that are ready before the grant are dropped."""
    return row(outgoing.TABLE, OUT.PENDING, outgoing.BytesReady, None)


@mutant
def publish_before_commit() -> Planted:
    """F2, F23, F28: the producer says that all has landed when it has only begun to write."""

    async def start_write(self: OutgoingRooms, machine: outgoing.Outgoing, event: Event) -> Event:
        assert machine.grant is not None
        region = machine.grant.region
        staged = await self._owners[machine.key].stage(machine, machine.grant)
        assert staged is not None

        async def write() -> None:
            await self.actor.ports.transfers.write(staged.views, region, staged.slots)

        self.actor.spawn("write", write())
        return outgoing.WriteSucceeded(0)

    return patched(OutgoingRooms, "start_write", start_write)


@mutant
def release_source_early() -> Planted:
    """F6, F8: the source is given back while the write still reads it."""
    do, leased = (outgoing.Do.START_WRITE, outgoing.Do.RELEASE_SOURCE), outgoing.SlotsLeased
    waits, keep = OUT.AWAITING_SLOTS, outgoing.keep_slots
    return row(outgoing.TABLE, waits, leased, OUT.WRITING, do, keep)


@mutant
def evict_referenced_rows() -> Planted:
    """F23, F24, F31: eviction does not ask who still needs the rows."""
    victims = LruCache.victims

    def any_victims(self: LruCache, needed: int, evictable: Any) -> list[str]:
        return victims(self, needed, lambda key: True)

    do = (embedding.Do.RELEASE_ROWS,)
    table = embedding.Embedding.table
    return several(
        patched(LruCache, "victims", any_victims),
        row(table, E.RESIDENT, embedding.EvictionRequested, E.EVICTED, do),
    )


@mutant
def cancel_frees_slots() -> Planted:
    """F6, F42: a cancelled load gives its slots back without waiting for the writer's message."""
    do = (incoming.Do.SEND_CANCEL, incoming.Do.RELEASE_SLOTS, incoming.Do.CONCLUDE_FAILED)
    note, to = incoming.note_cancelled, IN.CANCELLED
    return row(incoming.TABLE, IN.RESERVED, incoming.CancelRequested, to, do, note)


@mutant
def abort_frees_blocks() -> Planted:
    """F6, F43: an abort gives the blocks back while a step still uses them."""
    do = (request.Do.DEQUEUE, request.Do.RELEASE_BLOCKS, request.Do.SEND_ABORTED)
    prefilling = (*do, request.Do.RELEASE_EMBEDDINGS, request.Do.WITHDRAW_OFFER)
    return several(
        row(REQUEST, R.DECODING, request.AbortReceived, R.FINISHED, do),
        row(REQUEST, R.RUNNING, request.AbortReceived, R.FINISHED, prefilling),
    )


@mutant
def lost_peer_frees_slots() -> Planted:
    """F7: lost is taken for dead."""
    do = (incoming.Do.RELEASE_SLOTS, incoming.Do.CONCLUDE_FAILED)
    lost, note = room.PeerLost, room.note_lost
    return several(
        row(incoming.TABLE, IN.RESERVED, lost, IN.FAILED, do, note),
        row(incoming.TABLE, IN.CANCEL_PENDING, lost, IN.CANCELLED, do, note),
    )


@mutant
def fence_says_what_it_hopes() -> Planted:
    """F7: a fence that takes silence for death."""

    async def fence(
        self: SimTransferEngine, peer: Any, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        return True

    return patched(SimTransferEngine, "fence", fence)


@mutant
def grace_frees_slots() -> Planted:
    """F7: a quarantine that ends by time."""
    do = (incoming.Do.RELEASE_SLOTS,)
    return row(incoming.TABLE, IN.EXPIRE_PENDING, room.GraceEnded, IN.EXPIRED, do)


@mutant
def grants_reach_the_successor() -> Planted:
    """F44: messages for one life of a peer are sent to whoever has its name now."""
    send = Actor.send

    def send_by_name(self: Actor, to: Any, message: Any, payloads: Any = ()) -> bool:
        return send(self, to if isinstance(to, str) else to.instance_id, message, payloads)

    return several(
        patched(Actor, "send", send_by_name), patched(Actor, "is_lost", lambda self, address: False)
    )


@mutant
def migration_restarts_numbering() -> Planted:
    """F20: a migrated request numbers its tokens from zero again."""
    emit = Requests.emit_tokens

    def from_zero(self: Requests, machine: request.Request, event: Event) -> None:
        emit(self, machine, event)
        for chunks in self._outbox.values():
            last = chunks[-1]
            if last.request_id == machine.request_id and machine.num_emitted:
                chunks[-1] = TokenChunk(
                    request_id=last.request_id,
                    attempt=last.attempt,
                    start=last.start - machine.num_emitted,
                    token_ids=last.token_ids,
                    finish_reason=last.finish_reason,
                    logprobs=last.logprobs,
                )

    performers = {**Requests.performers, request.Do.EMIT_TOKENS: "emit_tokens"}
    return several(
        patched(Requests, "emit_tokens", from_zero), patched(Requests, "performers", performers)
    )


@mutant
def nobody_waits_for_a_restart() -> Planted:
    """F20: a request that lost its only instance fails though the instance is being restarted."""
    do = (generation.Do.ANSWER_ERROR, generation.Do.CLOSE)
    table, state = generation.Generation.table, generation.S.MIGRATING
    note = generation.note_no_topology
    return row(table, state, generation.NoTopology, generation.S.FAILED, do, note)


@mutant
def a_new_gateway_does_not_wait() -> Planted:
    """F17: a gateway that has just started answers 503 while its instances join."""
    do = (generation.Do.ANSWER_ERROR, generation.Do.CLOSE)
    table, state = generation.Generation.table, generation.S.QUEUED
    note = generation.note_no_topology
    return row(table, state, generation.NoTopology, generation.S.FAILED, do, note)


@mutant
def answer_without_image() -> Planted:
    """F40: a failed embedding is taken for an empty one."""
    do = (request.Do.ENQUEUE,)
    return several(
        row(REQUEST, R.WAITING_FOR_EMBEDDINGS, request.EmbeddingFailed, R.WAITING, do),
        mock.patch("epd.roles.steps.step._spans", lambda request, start, count: []),
    )


@mutant
def bad_image_fails_batch() -> Planted:
    """F13: one bad image fails its whole batch, as a thing that cannot be retried."""

    async def encode(self: EncodeRole, patches: list[Any]) -> list[Event]:
        results = await self._engine.encode(patches)
        if all(isinstance(result, Rows) for result in results):
            return [encoding.EncodeSucceeded(result) for result in results]
        return [encoding.EncodeFailed("the batch failed") for _ in results]

    def never_again(machine: encoding.Encoding, event: encoding.EncodeFailed) -> None:
        machine.patches, machine.in_batch = None, False
        machine.failure = Failure(FailureKind.MEDIA, event.reason)

    table = encoding.Encoding.table
    do = (encoding.Do.LEAVE_AHEAD, encoding.Do.FREE_PIXELS, encoding.Do.FAIL_ROOMS)
    return several(
        patched(EncodeRole, "_encode", encode),
        row(table, C.ENCODING, encoding.EncodeFailed, C.FAILED, do, never_again),
    )


@mutant
def no_single_flight() -> Planted:
    """F37: each request for a hash starts an encode of its own."""
    on_request = EncodeRole.on_encode_request

    def always_new(self: EncodeRole, received: Received) -> None:
        self.encodings.pop(received.message.mm_hash, None)
        on_request(self, received)

    return patched(EncodeRole, "on_encode_request", always_new)


@mutant
def no_commit_retry() -> Planted:
    """A lost commit is never said again, not even when the grant is repeated."""
    return several(
        row(outgoing.TABLE, OUT.WRITTEN, room.RetryDue, None),
        row(outgoing.TABLE, OUT.WRITTEN, outgoing.GrantReceived, None),
    )


@mutant
def no_grant_retry() -> Planted:
    """A lost grant is never said again."""
    return row(incoming.TABLE, IN.RESERVED, room.RetryDue, None)


@mutant
def new_registry_loses_the_absent() -> Planted:
    """F35: what a restarted gateway has not listed yet is taken for lost."""
    forget = Member._forget_old

    def forget_all(self: Member, place: GatewayPlace, present: set[tuple[str, int]]) -> None:
        place.listed |= set(self.actor.peers)
        forget(self, place, present)

    return patched(Member, "_forget_old", forget_all)


@mutant
def rope_delta_stays_home() -> Planted:
    """F26: decoding goes on at linear positions."""

    def without_delta(**fields: Any) -> KvState:
        return KvState(**{**fields, "rope_delta": 0})

    return patched(kv_producer, "KvState", without_delta)


@mutant
def deepstack_is_dropped() -> Planted:
    """F12: a cache hit delivers the main embedding without its other half."""
    fill_one = EncodeRole.fill_one

    def half(self: EncodeRole, machine: encoding.Encoding, event: Any) -> None:
        whole = machine.rows
        width = self._engine.contract.row_nbytes
        content = bytearray(whole.tensor)
        for start in range(0, len(content), width):
            content[start + width // 2 : start + width] = bytes(width // 2)
        machine.rows = Rows(bytes(content), whole.num_rows, whole.nbytes)
        fill_one(self, machine, event)

    return patched(EncodeRole, "fill_one", half)
