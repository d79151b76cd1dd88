"""The gateway: what it tells instances of an attempt, and what it makes of their messages."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.config import Limits
from epd.failure import Failure, FailureKind
from epd.frontend import Leave, Refused
from epd.fsm.generation import S
from epd.messages import (
    AbortEncode,
    AbortRequest,
    EncodeAccepted,
    EncodeRequest,
    Message,
    PrefillRequest,
    RequestAccepted,
    RowsKept,
    TokenChunk,
    Tokens,
)
from epd.roles.gateway.dispatch import DEADLINE_GRACE_S
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask
from tests.roles.desk import Open, gateway
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
IMAGES = (Image("one"), Image("two"))


# --- an attempt goes out --------------------------------------------------------------------------


def test_what_prefill_and_the_encoders_are_told() -> None:
    with gateway() as at:
        one = Open(at, "", *IMAGES, wants_timeline=True, tenant="mine")
        ((to, message),) = one.sent(PrefillRequest)
        asked = one.sent(EncodeRequest)
        now_s = at.actor.cluster_s()
        total_s, token_s = TIMING.request_timeout_s, TIMING.first_token_timeout_s
        due_s = now_s + min(total_s, token_s + DEADLINE_GRACE_S)
        items = one.prepared.items
        assert to == one.prefill
        assert (message.request_id, message.attempt, message.num_emitted) == (one.key, 1, 0)
        assert message.token_ids == one.prepared.token_ids
        assert message.sampling == one.prepared.sampling
        assert message.decode == one.machine.placement.decode
        assert message.gateway == at.actor.address
        assert message.deadline_s == pytest.approx(now_s + total_s)
        assert message.first_token_deadline_s == pytest.approx(due_s)
        assert (message.reports, message.scope, message.lease_s) == (True, "mine", 0.0)
        for index, (item, (encoder, request)) in enumerate(zip(items, asked, strict=True)):
            told = message.items[index]
            assert (told.index, told.mm_hash, told.offset) == (index, item.mm_hash, item.offset)
            assert (told.num_rows, told.grid_thw) == (item.num_rows, item.grid_thw)
            assert (told.room, told.encoder.instance_id) == (one.room(index), encoder)
            assert (told.offsets, told.second_per_grid) == (item.offsets, item.second_per_grid)
            assert (request.request_id, request.attempt) == (one.key, 1)
            assert (request.room, request.mm_hash) == (told.room, item.mm_hash)
            assert (request.num_rows, request.grid_thw) == (item.num_rows, item.grid_thw)
            assert request.consumer == one.machine.placement.prefill
            assert request.first_token_deadline_s == pytest.approx(due_s) and request.reports


def test_an_attempt_that_prefill_cannot_be_told_of_goes_elsewhere() -> None:
    with gateway() as at:
        send, full = at.actor.send, []

        def refuses(to: Any, message: Message, payloads: Any = ()) -> bool:
            if isinstance(message, PrefillRequest) and not full:
                full.append(to.instance_id)
                return False
            return bool(send(to, message, payloads))

        with mock.patch.object(at.actor, "send", refuses):
            one = Open(at)
        assert one.machine.attempt == 2 and one.machine.state is S.PLACED
        assert one.prefill != full[0]
        assert one.machine.failure == Failure(
            FailureKind.BUSY, f"instance {full[0]} takes no messages"
        )


def test_what_has_ended_while_it_was_prepared_is_not_sent() -> None:
    with gateway() as at:
        stream = at.cluster.within(GATEWAY, at.role.admit)
        at.cluster.within(GATEWAY, stream.cancel, Leave.GONE, "the client left")
        at.said.clear()
        prepared = Ask(1, 0.0, (11,), (), 3, 1).generation()
        at.cluster.within(GATEWAY, at.role.start_generation, stream, prepared)
        assert not at.said and not at.role.open_ones()


def test_there_are_so_many_places() -> None:
    with gateway(dataclasses.replace(DEFAULTS, limits=Limits(max_open_requests=2))) as at:
        first, second = Open(at), Open(at)
        assert first.key != second.key
        with pytest.raises(Refused) as refused:
            Open(at)
        assert refused.value.status == 429 and at.role.outcomes["rejected"] == 1
        first.tokens(0, 5, finish_reason="stop")
        Open(at)


def test_an_image_is_offered_until_its_encoder_has_accepted_it() -> None:
    with gateway() as at:
        doubt = at.actor.doubt = mock.Mock()
        one = Open(at, "", *IMAGES)
        doubt.assert_not_called()
        at.tell("on_encode_accepted", EncodeAccepted(room=one.room(0), attempt=1), one.encoder(0))
        assert not at.said
        at.cluster.pass_time(0.6 * TIMING.accept_timeout_s)
        ((to, again),) = one.sent(EncodeRequest)
        assert (to, again.room) == (one.encoder(1), one.room(1))
        doubt.assert_called_once_with(one.machine.placement.encoders[1])
        at.tell("on_encode_accepted", EncodeAccepted(room=one.room(1), attempt=1), one.encoder(1))
        at.cluster.pass_time(0.3 * TIMING.accept_timeout_s)
        assert not one.sent(EncodeRequest)


# --- tokens ---------------------------------------------------------------------------------------


def test_each_token_is_delivered_once_and_in_order() -> None:
    with gateway() as at:
        one = Open(at)
        one.tokens(0, 21, 22, num_accepted=1, num_rejected=2, num_cached=3)
        one.tokens(0, 21, 22)  # a copy
        one.tokens(2, 23)
        one.tokens(3, 24, finish_reason="stop")
        updates = one.updates()
        assert [u.token_ids for u in updates] == [(21, 22), (23,), (24,)]
        first = updates[0]
        assert (first.num_accepted, first.num_rejected, first.num_cached) == (1, 2, 3)
        assert [u.finish_reason for u in updates] == ["", "", "stop"]
        assert at.role.num_tokens == 4 and at.role.outcomes == {"finished": 1}
        assert not at.role.live()["generations"] and not at.role.live()["assigned"]


def test_a_hole_in_the_stream_is_a_failed_attempt_that_goes_on_behind_what_came() -> None:
    with gateway() as at:
        one = Open(at)
        one.tokens(0, 21)
        said = one.tokens(2, 23)
        assert one.machine.attempt == 2 and one.machine.failure.reason == "tokens 1 to 2 were lost"
        aborts = [message for message in said if isinstance(message, AbortRequest)]
        assert aborts == [AbortRequest(request_id=one.key, attempt=1)] * 2
        ((_, again),) = one.sent(PrefillRequest)
        assert again.token_ids == (*one.prepared.token_ids, 21) and again.num_emitted == 1
        one.tokens(1, 22)
        assert [u.token_ids for u in one.updates()] == [(21,), (22,)]


def test_who_works_on_what_is_over_is_told_so() -> None:
    with gateway() as at:
        one = Open(at, "", IMAGES[0])
        stale = TokenChunk(request_id=one.key, attempt=7, start=0, token_ids=(21,))
        over = AbortRequest(request_id=one.key, attempt=7)
        assert (
            at.tell("on_tokens", Tokens(chunks=(stale,)), "d0") == [over] and at.said[0][0] == "d0"
        )
        last = msgspec.structs.replace(stale, finish_reason="stop")
        assert at.tell("on_tokens", Tokens(chunks=(last,)), "d0") == []
        assert at.tell("on_accepted", RequestAccepted(request_id=one.key, attempt=7), "p0") == [
            over
        ]
        for room in (f"{one.key}/7/0", one.room(9), "nobody/1/0"):
            attempt = int(room.split("/")[1])
            told = at.tell("on_encode_accepted", EncodeAccepted(room=room, attempt=attempt), "e0")
            assert told == [AbortEncode(room=room)]
        assert not one.updates() and one.machine.attempt == 1
        assert not one.machine.accepted
        at.tell("on_accepted", RequestAccepted(request_id=one.key, attempt=1), "p0")
        assert one.machine.accepted


def test_who_works_on_what_was_given_up_is_told_so_before_the_next_attempt() -> None:
    """The message that gave it up may be lost, and the next one may be long in coming."""
    with gateway() as at:
        one = Open(at)
        one.fails(one.prefill, "engine")
        one.fails(one.prefill, "engine")
        assert one.machine.state is S.MIGRATING, "it pauses"
        over = AbortRequest(request_id=one.key, attempt=2)
        here = RequestAccepted(request_id=one.key, attempt=2)
        assert at.tell("on_accepted", here, one.prefill) == [over]
        assert one.tokens(0, 21) == [over]
        assert one.tokens(0, 21, finish_reason="stop") == []
        assert not one.updates() and not one.machine.accepted


def test_who_works_for_a_client_that_left_is_told_so_again() -> None:
    with gateway() as at:
        one = Open(at)
        at.cluster.within(GATEWAY, one.stream.cancel, Leave.GONE, "the client left")
        over = AbortRequest(request_id=one.key, attempt=1)
        here = RequestAccepted(request_id=one.key, attempt=1)
        assert at.tell("on_accepted", here, one.prefill) == [over]
        assert one.tokens(0, 21) == [over]
        assert one.machine.state is S.CANCELLING
        assert one.tokens(1, 22, finish_reason="stop") == []
        assert one.machine.state is S.CANCELLING, "tokens before these may be on their way"
        assert one.tokens(0, 21, 22, finish_reason="stop") == []
        assert one.machine.state is S.CANCELLED


def test_what_comes_too_late_takes_no_held_prompt() -> None:
    with gateway() as at:
        held = Open(at, "prefill")
        held.tokens(0, 21, finish_reason="length")
        one = Open(at)
        one.machine.asked = dataclasses.replace(one.prepared, claim=held.key)
        one.fails(one.prefill, "engine")
        one.fails(one.prefill, "engine")
        assert one.tokens(0, 21, finish_reason="stop") == []
        assert at.whole.dispatcher.holds.claimed_by(one.machine)


def test_with_its_first_token_a_request_needs_no_rows_any_more() -> None:
    with gateway() as at:
        one = Open(at, "", IMAGES[0])
        told = EncodeAccepted(room=one.room(0), attempt=1)
        assert at.tell("on_encode_accepted", told, one.encoder(0)) == []
        one.tokens(0, 21)
        assert at.tell("on_encode_accepted", told, one.encoder(0)) == [
            AbortEncode(room=one.room(0))
        ]


def test_who_goes_on_with_a_held_prompt_lets_it_go_with_the_first_token() -> None:
    with gateway() as at:
        held = Open(at, "prefill")
        where = held.prefill
        held.tokens(0, 21, finish_reason="length")
        ask = dataclasses.replace(held.prepared, stage="", claim=held.key)
        stream = at.cluster.within(GATEWAY, at.role.submit, ask)
        machine = at.role.current(stream.request_id, 1)
        assert machine.placement.prefill.instance_id == where
        for start in (0, 1):
            chunk = TokenChunk(
                request_id=stream.request_id, attempt=1, start=start, token_ids=(21,)
            )
            told = at.tell("on_tokens", Tokens(chunks=(chunk,)), "d0")
            assert told == ([] if start else [AbortRequest(request_id=held.key, attempt=1)])
            assert not told or at.said[0][0] == where


# --- rows alone -----------------------------------------------------------------------------------


def test_the_last_rows_that_are_kept_are_the_answer() -> None:
    with gateway() as at:
        one = Open(at, "encode", *IMAGES)
        asked = one.sent(EncodeRequest)
        assert [request.consumer for _, request in asked] == [None, None]
        assert not one.sent(PrefillRequest)
        at.tell("on_encode_accepted", EncodeAccepted(room=one.room(0), attempt=1), one.encoder(0))
        assert one.machine.accepted
        for _ in range(2):
            at.tell(
                "on_rows_kept",
                RowsKept(request_id=one.key, attempt=1, room=one.room(0)),
                one.encoder(0),
            )
            assert not one.machine.terminal
        at.tell(
            "on_rows_kept",
            RowsKept(request_id=one.key, attempt=7, room=one.room(1)),
            one.encoder(1),
        )
        assert not one.machine.terminal
        at.tell(
            "on_rows_kept",
            RowsKept(request_id=one.key, attempt=1, room=one.room(1)),
            one.encoder(1),
        )
        (update,) = one.updates()
        assert (update.token_ids, update.finish_reason) == ((), "length")


def test_images_alone_are_offered_until_their_rows_are_kept() -> None:
    with gateway() as at:
        one = Open(at, "encode", *IMAGES)
        at.tell("on_encode_accepted", EncodeAccepted(room=one.room(0), attempt=1), one.encoder(0))
        at.tell(
            "on_rows_kept",
            RowsKept(request_id=one.key, attempt=1, room=one.room(1)),
            one.encoder(1),
        )
        at.cluster.pass_time(0.6 * TIMING.accept_timeout_s)
        assert [request.room for _, request in one.sent(EncodeRequest)] == [one.room(0)]
