"""KV from prefill to decode: what is offered, granted, committed, taken, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.failure import Failure, FailureKind
from epd.fsm import incoming
from epd.fsm import request as fsm
from epd.fsm.outgoing import BytesReady, KvSource
from epd.fsm.request import Request, S
from epd.groups.asks import LandKv
from epd.messages import (
    Address,
    CancelTransfer,
    Grant,
    KvLayout,
    KvOffer,
    KvState,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
    TokenLogprobs,
)
from epd.roles.decode.landing import Landing
from epd.roles.prefill.kv_producer import KvProducer
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY, Settings
from epd_lab.sim.engine.golden import BLOCK_SIZE, KV_LAYOUT
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

DECODE, FRONT = Address("d0", 1, ""), Address(GATEWAY, 1, "")
NUM_TOKENS = 2 * BLOCK_SIZE + 1
TOKENS = tuple(range(20, 20 + NUM_TOKENS))
SAMPLING = SamplingParams(max_tokens=5, seed=7)


def due_s(at: Desk, left_s: float = 20.0) -> float:
    return at.actor.cluster_s() + left_s


# --- prefill --------------------------------------------------------------------------------------


def prefill(at: Desk, **other: Any) -> Request:
    """p0 begins a prompt, and goes on to its first token."""
    due = due_s(at)
    made = PrefillRequest(
        request_id="r",
        attempt=1,
        token_ids=TOKENS,
        num_emitted=0,
        items=(),
        sampling=SAMPLING,
        decode=DECODE,
        gateway=FRONT,
        deadline_s=due,
        reports=True,
        scope="mine",
        first_token_deadline_s=due - 5.0,
    )
    message = msgspec.structs.replace(made, **other)
    at.said.clear()
    at.do(at.role.on_prefill_request, Received(GATEWAY, 1, message, ()))
    request: Request = at.cluster.instance("p0").requests.get("r/1")  # type: ignore[union-attr]
    at.cluster.pass_time(0.1)
    return request


def offers(at: Desk) -> list[KvOffer]:
    return [message for message in at.messages() if isinstance(message, KvOffer)]


def test_what_decode_is_offered() -> None:
    with desk("1e1p1d", "p0", "prefill") as at:
        due = due_s(at)
        request = prefill(at)
        (offer,) = offers(at)
        assert at.said[0] == ("d0", offer)
        assert (offer.room, offer.request_id, offer.attempt) == ("r/1/kv", "r", 1)
        assert (offer.num_prompt_tokens, offer.num_emitted) == (NUM_TOKENS, 0)
        assert (offer.token_ids, offer.sampling, offer.layout) == (TOKENS, SAMPLING, KV_LAYOUT)
        assert (offer.gateway, offer.reports, offer.scope) == (FRONT, True, "mine")
        assert (offer.deadline_s, offer.first_token_deadline_s) == (due, due - 5.0)
        assert request.state is S.TRANSFERRING and not request.decode_here
        transfer = at.cluster.instance("p0").outgoing.find("r/1/kv")
        assert transfer is not None and transfer.owner == "r/1"
        assert transfer.nbytes == 3 * KV_LAYOUT.block_nbytes
        kv = at.part(KvProducer)
        assert kv.find(request) is transfer and kv.live() == {"kv_parts_held": 0}
        assert transfer.kv.blocks == request.block_table
        assert transfer.kv.state == kv_state(first_token=request.output[0])


def test_the_last_token_of_an_answer_is_said_where_its_prompt_was_computed() -> None:
    with desk("1e1p1d", "p0", "prefill") as at:
        request = prefill(at, sampling=SamplingParams(max_tokens=1))
        assert request.decode_here and not offers(at) and request.state is S.FINISHED
    with desk("1e1p1d", "p0", "prefill") as at:
        assert prefill(at, num_emitted=3).decode_here is False
    with desk("1e1p1d", "p0", "prefill") as at:
        assert prefill(at, num_emitted=4).decode_here


@pytest.mark.parametrize(("caching", "states"), [(True, False), (False, False), (True, True)])
def test_a_lease_is_of_use_where_blocks_can_be_found(*, caching: bool, states: bool) -> None:
    """And where they are all that is needed."""
    holds = caching and not states
    engine = msgspec.structs.replace(DEFAULTS.engine, prefix_caching=caching)
    settings = replace(DEFAULTS, engine=engine, has_state=states)
    with desk("1e1p1d", "p0", "prefill", settings) as at:
        request = prefill(at, sampling=SamplingParams(max_tokens=1), lease_s=3.0)
        assert (request.lease_s, request.state) == ((3.0, S.HELD) if holds else (0.0, S.FINISHED))
        assert at.role.held.live() == {"held_prompts": int(holds)}
        at.cluster.pass_time(3.0)
        assert request.state is S.FINISHED and at.role.held.live() == {"held_prompts": 0}


def test_an_offer_that_is_refused_fails_the_request_with_its_reason() -> None:
    with desk("1e1p1d", "p0", "prefill") as at:
        request = prefill(at)
        rooms = at.cluster.instance("p0").outgoing
        at.said.clear()
        word = CancelTransfer(
            room="r/1/kv", attempt=1, failure=Failure(FailureKind.CAPACITY, "too long")
        )
        at.do(rooms.on_cancel, Received("d0", 1, word, ()))
        failed = [m for m in at.messages() if isinstance(m, RequestFailed)]
        assert [m.failure for m in failed] == [Failure(FailureKind.CAPACITY, "too long", "d0")]
        assert request.terminal
        at.cluster.pass_time(0.1)
        requests = at.cluster.instance("p0").requests
        assert requests is not None and requests.pool.num_leased == 0
        assert at.part(KvProducer).live() == {"kv_parts_held": 0}


def test_who_is_called_off_withdraws_its_offer() -> None:
    with desk("1e1p1d", "p0", "prefill") as at:
        request = prefill(at)
        at.do(at.whole.requests.fire, request, fsm.AbortReceived())
        transfer = at.part(KvProducer).find(request)
        assert transfer.failure == Failure(FailureKind.WITHDRAWN, "prefill ended the request")
        at.do(at.part(KvProducer).withdraw_offer, SimpleNamespace(kv_room="never offered"), None)
        assert at.actor.counters["faults"] == 0


def test_what_is_ready_of_whom_has_left_stays_held() -> None:
    with desk("1e1p1d", "p0", "prefill") as at:
        request, kv = prefill(at), at.part(KvProducer)
        held, block = hold(at, request)
        held.owner, held.kv = "nobody", None
        kv.hold_part(held)
        with mock.patch.object(at.whole.requests, "return_blocks") as back:
            kv.release_source(held)
        back.assert_called_once_with((block,))
        assert kv.granted(SimpleNamespace(key="r", owner="nobody")) is None
        kv.concluded(SimpleNamespace(key="r", owner="nobody"), None)
        assert at.actor.counters["faults"] == 0 and kv.live() == {"kv_parts_held": 0}


def hold(at: Desk, request: Request) -> tuple[Any, int]:
    """The first part of its KV is ready, in a block that it has no more."""
    (block,) = at.whole.requests.pool.take(1)
    room = at.part(KvProducer).find(request)
    room.kv = KvSource((block, *request.block_table[1:]), room.kv.state)
    room.grant = SimpleNamespace(num_held=0, held=(), layout=KV_LAYOUT)
    room.written_nbytes, room.ready_nbytes = 0, KV_LAYOUT.block_nbytes
    at.part(KvProducer).hold_part(room)
    return room, block


def stage(at: Desk, request: Request, layout: KvLayout, num_blocks: int) -> Any:
    """So many blocks of its KV are taken from where they are, for a decode instance like that."""
    slots = range(6 * layout.slots_per_block)
    grant: Any = SimpleNamespace(num_held=0, held=(), slots=slots, layout=layout, region=None)
    known = at.part(KvProducer).find(request).kv
    source = KvSource(request.block_table, known.state)
    one = {"key": request.kv_room, "kv": source, "peer": DECODE, "grant": grant}
    part = {"written_nbytes": 0, "part_nbytes": num_blocks * layout.block_nbytes}
    outgoing: Any = SimpleNamespace(**one, **part)
    work = at.part(KvProducer).stage(outgoing, grant)
    at.cluster.within("p0", at.cluster.world.loop.create_task, work)
    at.cluster.pass_time(0.0)
    return outgoing


def test_what_was_ready_is_sent_from_the_blocks_that_are_held() -> None:
    """Its request may have given way meanwhile, and have others, which are not computed yet."""
    with desk("1e1p1d", "p0", "prefill") as at:
        request, size = prefill(at), KV_LAYOUT.slots_per_block
        _, block = hold(at, request)
        with (
            mock.patch.object(at.whole.requests.engine, "fetch_kv", mock.AsyncMock()) as fetch,
            mock.patch.object(at.actor.ports.transfers, "takes_references"),
        ):
            stage(at, request, KV_LAYOUT, 2)
        blocks = (block, request.block_table[1])
        assert fetch.call_args.args == ([b * size + n for b in blocks for n in range(size)],)


def test_what_was_sent_whole_stays_so_when_it_is_computed_again() -> None:
    """Who gave way begins before what was sent, and decode counts what it has got."""
    with desk("1e1p1d", "p0", "prefill") as at:
        request, kv = prefill(at), at.part(KvProducer)
        record, nbytes = at.whole.requests.record(request), 2 * KV_LAYOUT.block_nbytes
        grant = SimpleNamespace(num_held=0, held=(), layout=KV_LAYOUT)
        outgoing = SimpleNamespace(key="r", peer=DECODE, grant=grant, ready_nbytes=nbytes)
        record.num_whole = None
        found = mock.patch.object(kv, "find", return_value=outgoing)
        with found, mock.patch.object(at.whole.outgoing, "post"):
            at.do(kv.push_kv, request, fsm.LayersComputed(BLOCK_SIZE, 0))
        assert record.num_whole == 2


def test_a_state_goes_whole_whatever_blocks_decode_has_for_it() -> None:
    """Groups of other sizes: two blocks of it here, and three there."""
    layout = msgspec.structs.replace(KV_LAYOUT, most_state_blocks=2)
    ours = mock.patch("epd_lab.sim.engine.engines.layout_of", return_value=layout)
    with ours, desk("1e1p1d", "p0", "prefill") as at:
        request, kv, size = prefill(at), at.part(KvProducer), KV_LAYOUT.slots_per_block
        theirs = msgspec.structs.replace(KV_LAYOUT, most_state_blocks=3, ranks=((0, 1), (1, 1)))
        request.block_table = (7, 8, 1, 2, 3)
        with mock.patch.object(at.whole.requests.kv, "writes", return_value=[]) as writes:
            outgoing = stage(at, request, theirs, 6)
        sent = writes.call_args.args[0]
        assert list(sent.slots) == list(range(size, 4 * size))
        assert (list(sent.state), list(sent.targets)) == ([7, 8], list(range(3 * size)))
        assert list(sent.state_targets) == list(range(3 * size, 6 * size))
        found = mock.patch.object(kv, "find", return_value=outgoing)
        with found, mock.patch.object(at.whole.outgoing, "post") as post:
            at.do(kv.hand_over_kv, request, None)
        ((room, ready),) = (call.args for call in post.call_args_list)
        assert room is outgoing and ready == BytesReady(outgoing.part_nbytes, outgoing.kv)


# --- decode ---------------------------------------------------------------------------------------


def offered(
    at: Desk, num_tokens: int = NUM_TOKENS, source: str = "p0", key: str = "r"
) -> tuple[Request, Any]:
    """d0 is offered a prompt; its request and its room."""
    due = due_s(at)
    message = KvOffer(
        room=f"{key}/1/kv",
        request_id=key,
        attempt=1,
        num_prompt_tokens=num_tokens,
        num_emitted=0,
        token_ids=tuple(range(20, 20 + num_tokens)),
        sampling=SAMPLING,
        layout=KV_LAYOUT,
        gateway=FRONT,
        deadline_s=due,
        first_token_deadline_s=due - 5.0,
    )
    at.tell("on_kv_offer", message, source)
    request = at.whole.requests.get(f"{key}/1")
    return request, at.cluster.instance("d0").incoming.find(f"{key}/1/kv")


def test_what_prefill_is_granted() -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        due = due_s(at)
        request, transfer = offered(at)
        ((to, grant),) = at.said
        assert isinstance(grant, Grant) and to == "p0"
        slots = 3 * KV_LAYOUT.slots_per_block
        assert (grant.room, grant.attempt, grant.mm_hash) == ("r/1/kv", 1, "")
        assert (len(grant.slots), grant.contract, grant.num_rows) == (slots, None, NUM_TOKENS)
        assert (grant.deadline_s, grant.num_held) == (pytest.approx(due - 5.0), 0)
        assert transfer.nbytes == 3 * KV_LAYOUT.block_nbytes and transfer.num_rows == NUM_TOKENS
        assert request.state is S.WAITING_FOR_REMOTE_KV and request.decode_here
        assert at.whole.requests.reports.related[0](request) == [transfer]


def test_states_that_cannot_come_here_are_refused_with_the_reason() -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        with mock.patch.object(at.whole.requests.kv, "objection", return_value="of other ranks"):
            request, transfer = offered(at)
        assert request is None and transfer is None
        refusal = Failure(FailureKind.CONTRACT, "of other ranks")
        assert at.said == [("p0", CancelTransfer(room="r/1/kv", attempt=1, failure=refusal))]


def kv_state(**other: Any) -> KvState:
    made = KvState(
        num_tokens=NUM_TOKENS,
        first_token=TokenLogprobs(21, 0.0),
        rope_delta=0,
        num_layers=KV_LAYOUT.num_layers,
        num_blocks=3,
        num_whole=3,
        num_cached=0,
    )
    return msgspec.structs.replace(made, **other)


def published(at: Desk, transfer: Any) -> Any:
    done: list[Any] = []

    async def run() -> None:
        done.append(await at.role.publish(transfer))

    at.cluster.within("d0", at.cluster.world.loop.create_task, run())
    at.cluster.pass_time(0.0)
    return done[0]


WRONG = [
    None,
    kv_state(num_tokens=NUM_TOKENS + 1),
    kv_state(num_layers=KV_LAYOUT.num_layers + 1),
    kv_state(num_blocks=4),
    kv_state(num_whole=4),
    kv_state(num_whole=-1),
]


@pytest.mark.parametrize("state", WRONG)
def test_kv_that_is_not_what_was_granted_is_not_decoded(state: KvState | None) -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        _, transfer = offered(at)
        transfer.kv, transfer.parts = state, ((transfer.nbytes, 0),)
        assert isinstance(published(at, transfer), incoming.PublishFailed)


@pytest.mark.parametrize("num_whole", [0, 3])
def test_kv_that_came_is_put_in_place(num_whole: int) -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        _, transfer = offered(at)
        transfer.kv, transfer.parts = kv_state(num_whole=num_whole), ((transfer.nbytes, 0),)
        own, inbox = at.whole.requests.kv.own, mock.Mock()
        own.region.inboxes.append(inbox)
        with mock.patch.object(own, "land", mock.AsyncMock(wraps=own.land)) as land:
            assert published(at, transfer) == incoming.Published()
            inbox.take_in.assert_called_once_with(own.region)
            transport = at.whole.incoming.transport_of(transfer)
            asked = LandKv(transport=transport, slots=transfer.slots, blocks=transfer.blocks)
            land.assert_awaited_once_with(asked)
            transfer.parts = ((1, 0),)
            assert isinstance(published(at, transfer), incoming.PublishFailed)
            assert inbox.take_in.call_count == land.await_count == 1


OUTCOMES = [
    ("withdrawn", fsm.KvWithdrawn()),
    ("engine", fsm.KvFailed(Failure(FailureKind.ENGINE, "because", "p0"))),
]


@pytest.mark.parametrize(("kind", "outcome"), OUTCOMES)
def test_why_no_kv_comes_is_the_requests_event(kind: str, outcome: Any) -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        request, transfer = offered(at)
        failure = Failure(FailureKind(kind), "because")
        with mock.patch.object(at.whole.requests, "post") as post:
            at.do(lambda: at.role.concluded(transfer, failure))
        post.assert_called_once_with(request, outcome)


def test_kv_that_arrived_is_decoded_in_its_blocks() -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        request, transfer = offered(at)
        transfer.kv = kv_state()
        with mock.patch.object(at.whole.requests, "post") as post:
            at.do(lambda: at.role.concluded(transfer, None))
        (one, event) = post.call_args.args
        assert one is request and event.kv == kv_state()
        assert sorted(event.blocks) == [0, 1, 2] and at.role.live() == {"kv_landing": 0}


def test_an_offer_that_is_called_off_in_line_leaves_it() -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        requests = at.whole.requests
        with mock.patch.object(requests, "pump"):
            request, transfer = offered(at)
        assert sum(requests.live()[kind] for kind in ("running", "waiting")) == 1
        at.do(requests.fire, request, fsm.AbortReceived())
        assert transfer.state is incoming.S.CANCELLED and request.terminal
        assert sum(requests.live()[kind] for kind in ("running", "waiting")) == 0
        at.do(at.role.cancel_transfer, SimpleNamespace(kv_room="never offered"), None)
        assert at.actor.counters["faults"] == 0


def test_who_is_called_off_waits_for_no_memory_to_land_in() -> None:
    with desk("1e1p1d", "d0", "decode", Settings(num_landing_blocks=8)) as at:
        with mock.patch.object(Landing, "grants", return_value=()):
            request, transfer = offered(at)
            assert transfer.state is incoming.S.AWAITING_LANDING
            at.do(at.whole.requests.fire, request, fsm.AbortReceived())
        assert transfer.state is incoming.S.CANCELLED and at.role.live() == {"kv_landing": 0}
        assert at.whole.requests.pool.num_leased == 0
