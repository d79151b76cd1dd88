"""The gateway: how attempts fail, who is to blame, how long is waited, and what is shown of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from epd.failure import Failure, FailureKind
from epd.frontend import Leave
from epd.fsm.generation import S
from epd.messages import (
    AbortEncode,
    AbortRequest,
    Address,
    EncodeAccepted,
    EncodeRejected,
    EncodeRequest,
    PrefillRequest,
    RequestAborted,
    RequestAccepted,
    RequestInquiry,
    Span,
    StageReport,
)
from epd.roles.gateway.dispatch import DEADLINE_GRACE_S, _is_absent
from epd.roles.gateway.elsewhere import Elsewhere
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from tests.roles.desk import Desk, Open, desk, gateway
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
IMAGES = (Image("one"), Image("two"))


# --- failures -------------------------------------------------------------------------------------


def avoided(one: Open) -> set[str]:
    return set(one.machine.avoided)


def test_who_rejects_an_image_is_avoided() -> None:
    with gateway() as at:
        one = Open(at, "", IMAGES[0])
        encoder = one.encoder(0)
        rejected = EncodeRejected(
            request_id=one.key,
            attempt=1,
            room=one.room(0),
            failure=Failure(FailureKind.BUSY, "it is full"),
        )
        said = at.tell("on_failed", rejected, encoder)
        assert AbortEncode(room=f"{one.key}/1/0") in said
        assert one.machine.failure == Failure(FailureKind.BUSY, "it is full")
        assert one.machine.attempt == 2 and one.encoder(0) != encoder
        assert avoided(one) == {encoder}


@pytest.mark.parametrize(
    ("kind", "culprit", "blamed"),
    [
        ("engine", "", {"p0"}),
        ("engine", "e1", {"e1"}),
        ("transfer", "d0", {"p0", "d0"}),
        ("absent", "", set()),
    ],
)
def test_whose_failure_it_was(kind: str, culprit: str, blamed: set[str]) -> None:
    with gateway() as at:
        one = Open(at, "", IMAGES[0])
        one.fails("p0", kind, culprit=culprit)
        assert one.machine.attempt == 2 and avoided(one) == blamed
        assert _is_absent(one.machine) == (kind == "absent")


def test_a_mistake_of_the_request_is_the_answer() -> None:
    with gateway() as at:
        one = Open(at)
        one.fails("p0", "media")
        (update,) = one.updates()
        assert update.error is not None and update.error.status == 400
        assert at.role.outcomes == {"rejected": 1}


def test_what_no_other_may_do_better_is_not_tried_again() -> None:
    with gateway() as at:
        one = Open(at)
        one.fails("p0", "contract")
        (update,) = one.updates()
        assert update.error is not None and update.error.kind == "contract"


def test_messages_of_the_lost_and_of_earlier_attempts_are_no_failures() -> None:
    with gateway() as at:
        one = Open(at)
        one.fails("p0", "engine", attempt=7)
        at.actor.lost.add(("p0", 1))
        one.fails("p0", "engine")
        assert one.machine.attempt == 1 and one.machine.state is S.PLACED


def test_a_deadline_that_an_instance_knows_of_ends_the_request() -> None:
    with gateway() as at:
        one = Open(at)
        one.fails("p0", "deadline")
        (update,) = one.updates()
        assert update.error is not None and update.error.status == 504


def test_a_client_that_left_is_forgotten_when_all_have_confirmed() -> None:
    with gateway() as at:
        one = Open(at)
        at.said.clear()
        at.cluster.within(GATEWAY, one.stream.cancel, Leave.GONE, "the client left")
        both = {one.prefill, one.decode}
        assert one.sent(AbortRequest) == [
            (n, AbortRequest(request_id=one.key, attempt=1)) for n in sorted(both)[::-1]
        ]
        for source, attempt in ((one.prefill, 1), (one.prefill, 1), (one.decode, 7)):
            at.tell("on_aborted", RequestAborted(request_id=one.key, attempt=attempt), source)
            assert one.machine.state is S.CANCELLING
        at.tell("on_aborted", RequestAborted(request_id=one.key, attempt=1), one.decode)
        assert one.machine.state is S.CANCELLED and at.role.outcomes == {"cancelled": 1}
        at.tell("on_aborted", RequestAborted(request_id=one.key, attempt=1), one.decode)


# --- the end of instances -------------------------------------------------------------------------


def lose(at: Desk, address: Address) -> None:
    info = SimpleNamespace(address=address, host_id="")
    at.do(at.whole.registry.on_lost, SimpleNamespace(info=info, was_lost=True, seen_s=0.0), False)


def test_the_loss_of_an_instance_is_that_of_its_attempts() -> None:
    with gateway() as at:
        one, other = Open(at, "", IMAGES[0]), Open(at)
        placement = one.machine.placement
        lose(at, placement.encoders[0])  # prefill tells of it
        lose(at, msgspec.structs.replace(placement.prefill, epoch=9))
        assert one.machine.attempt == other.machine.attempt == 1
        lose(at, placement.prefill)
        assert one.machine.attempt == 2
        assert one.machine.failure.kind is FailureKind.LOST
        assert avoided(one) == {placement.prefill.instance_id}
        assert other.machine.attempt == 1 + (other.machine.failure is not None)


def test_once_tokens_come_only_the_loss_of_decode_counts() -> None:
    with gateway() as at:
        one = Open(at)
        one.tokens(0, 21)
        lose(at, one.machine.placement.prefill)
        assert one.machine.attempt == 1
        lose(at, one.machine.placement.decode)
        assert one.machine.attempt == 2 and one.machine.failure.kind == "lost"


def test_the_loss_of_an_encoder_moves_what_wants_no_more_than_rows() -> None:
    with gateway() as at:
        one = Open(at, "encode", *IMAGES)
        first = one.machine.placement.encoders[0]
        at.said.clear()
        lose(at, first)
        moved = one.machine.placement.encoders
        assert one.machine.attempt == 1 and first not in moved
        (request,) = [m for m in at.messages() if isinstance(m, EncodeRequest)]
        assert request.room == f"{one.room(0)}.1" and request.consumer is None


def test_what_is_not_placed_has_nothing_to_lose() -> None:
    with gateway() as at:
        at.cluster.within(GATEWAY, at.role.admit)
        lose(at, Address("p0", 1, ""))
        assert at.actor.counters["faults"] == 0


def test_images_that_a_silent_encoder_has_not_taken_are_encoded_elsewhere() -> None:
    with gateway() as at:
        taken, waits, too = (Open(at, "", IMAGES[0]) for _ in range(3))
        encoder = waits.machine.placement.encoders[0]
        assert taken.machine.placement.encoders[0] == encoder, "equal images meet"
        at.tell(
            "on_encode_accepted", EncodeAccepted(room=taken.room(0), attempt=1), encoder.instance_id
        )
        at.do(at.part(Elsewhere).peer_silent, encoder)
        at_other = [one.machine.placement.encoders[0] != encoder for one in (taken, waits, too)]
        assert at_other == [False, True, True]
        assert [one.machine.attempt for one in (taken, waits, too)] == [1, 1, 1]


def test_without_another_encoder_the_silence_of_one_ends_the_attempt() -> None:
    with desk("1e1p1d", GATEWAY, "role") as at:
        waits = Open(at, "", IMAGES[0])
        encoder = waits.machine.placement.encoders[0]
        at.do(at.part(Elsewhere).peer_silent, encoder)
        assert waits.machine.attempt == 2
        reason = f"instance {encoder.instance_id} does not answer"
        assert waits.machine.failure == Failure(FailureKind.LOST, reason)
        assert avoided(waits) == {encoder.instance_id}


# --- time -----------------------------------------------------------------------------------------

SHORT = msgspec.structs.replace(TIMING, accept_timeout_s=0.2, stall_timeout_s=0.5)
HASTY = dataclasses.replace(DEFAULTS, timing=SHORT)


def test_who_does_not_accept_is_doubted_and_avoided() -> None:
    with gateway(HASTY) as at:
        doubt = at.actor.doubt = mock.Mock()
        one = Open(at)
        prefill = one.machine.placement.prefill
        at.cluster.pass_time(0.19)
        assert one.machine.attempt == 1
        at.cluster.pass_time(0.02)
        doubt.assert_called_once_with(prefill)
        assert one.machine.attempt == 2 and avoided(one) == {prefill.instance_id}
        assert f"instance {prefill.instance_id} did not accept" in one.machine.failure.reason


def test_a_silent_attempt_is_inquired_after_and_then_given_up() -> None:
    with gateway(HASTY) as at:
        doubt = at.actor.doubt = mock.Mock()
        one = Open(at)
        at.tell("on_accepted", RequestAccepted(request_id=one.key, attempt=1), one.prefill)
        needed = [one.machine.placement.prefill, one.machine.placement.decode]
        names = [address.instance_id for address in needed]
        inquired = [(name, RequestInquiry(request_id=one.key, attempt=1)) for name in names]
        at.cluster.pass_time(0.19)
        assert not at.said
        at.cluster.pass_time(0.02)
        assert at.said == inquired
        assert [call.args[0] for call in doubt.call_args_list] == needed
        at.cluster.pass_time(0.2)
        assert at.said == inquired * 2
        assert one.machine.attempt == 1
        at.cluster.pass_time(0.1)
        assert one.machine.attempt == 2 and avoided(one) == set(names)
        assert one.machine.failure.reason == "no message of it arrived for 0.5 s"


def test_images_alone_are_not_inquired_after() -> None:
    with gateway(HASTY) as at:
        doubt = at.actor.doubt = mock.Mock()
        one = Open(at, "encode", IMAGES[0])
        at.tell("on_encode_accepted", EncodeAccepted(room=one.room(0), attempt=1), one.encoder(0))
        at.said.clear()
        at.cluster.pass_time(0.21)
        assert not one.sent(RequestInquiry) and doubt.called


@pytest.mark.parametrize("num_said", [0, 1])
def test_a_client_waits_for_a_token_as_long_as_it_says(num_said: int) -> None:
    timing = msgspec.structs.replace(TIMING, first_token_timeout_s=0.3, token_timeout_s=0.15)
    with gateway(dataclasses.replace(DEFAULTS, timing=timing)) as at:
        one = Open(at)
        if num_said:
            one.tokens(0, 21)
        limit_s = 0.15 if num_said else 0.3
        at.cluster.pass_time(limit_s - 0.01)
        assert not one.machine.terminal
        at.cluster.pass_time(0.02)
        assert one.machine.terminal
        which = "no further token" if num_said else "no token"
        reason = f"{which} came within {limit_s:g} s"
        assert one.machine.failure == Failure(FailureKind.DEADLINE, reason)


def test_the_whole_is_cut_a_little_after_its_instances_end_it() -> None:
    timing = msgspec.structs.replace(TIMING, request_timeout_s=0.3)
    with gateway(dataclasses.replace(DEFAULTS, timing=timing)) as at:
        one = Open(at)
        ((_, message),) = one.sent(PrefillRequest)
        assert message.first_token_deadline_s == message.deadline_s
        one.tokens(0, 21)
        at.cluster.pass_time(0.3 + DEADLINE_GRACE_S - 0.01)
        assert not one.machine.terminal
        at.cluster.pass_time(0.02)
        assert one.updates()[-1].finish_reason == "length"


def test_a_second_retry_and_later_ones_pause_longer_and_longer() -> None:
    with gateway() as at:
        one = Open(at)
        for attempt, pause_s in ((1, 0.0), (2, 0.2), (3, 0.4)):
            assert one.machine.attempt == attempt
            one.fails("p0", ("engine", "lost", "busy")[attempt - 1])
            if pause_s:
                at.cluster.pass_time(pause_s - 0.01)
                assert one.machine.attempt == attempt
                at.cluster.pass_time(0.02)
        assert one.machine.attempt == 4


# --- what is shown --------------------------------------------------------------------------------


def test_a_timeline_is_that_of_what_is_open() -> None:
    with gateway() as at:
        one = Open(at, wants_timeline=True)
        at_s = at.actor.clock.wall_s() + 1.0
        span = Span(machine="REQUEST", state="RUNNING", at_s=at_s, key=f"{one.key}/1")
        at.tell("on_report", StageReport(request_id=one.key, attempt=1, spans=(span,)), "p0")
        failed = Span(machine="REQUEST", state="FAILED", at_s=at_s + 1.0, key=f"{one.key}/1")
        one.fails("p0", "engine", spans=(failed,))
        shown = [(e.instance, e.state) for e in one.stream.timeline() if e.machine == "REQUEST"]
        assert shown == [("p0", "RUNNING"), ("p0", "FAILED")]
        told_s = [e.at_s for e in one.stream.timeline()]
        world = at.cluster.world
        world.set_clock(world.processes[GATEWAY], 50.0)  # it shows all by that
        assert [e.at_s for e in one.stream.timeline()] == pytest.approx([t + 50 for t in told_s])
        at.tell("on_report", StageReport(request_id="nobody", attempt=1, spans=(span,)), "p0")
        assert at.role.live()["timelines"] == 1
        one.tokens(0, 21, finish_reason="stop")
        assert at.role.live()["timelines"] == 0
        assert any(e.state == "RUNNING" for e in one.stream.timeline()), "it keeps what it read"


def test_how_rows_and_kv_move_is_told() -> None:
    with gateway() as at:
        one = Open(at, "", IMAGES[0])
        params = one.stream.transfer_params()
        (item,) = one.prepared.items
        assert set(params.ec) == {item.mm_hash}
        ec = params.ec[item.mm_hash]
        assert (ec["remote_engine_id"], ec["num_rows"]) == (one.encoder(0), item.num_rows)
        assert ec["transport"] and params.kv["transport"]
        assert params.kv == {
            "do_remote_prefill": True,
            "remote_engine_id": one.prefill,
            "remote_request_id": one.key,
            "decode_engine_id": one.decode,
            "transport": params.kv["transport"],
            "num_prompt_tokens": len(one.prepared.token_ids),
        }
        alone = Open(at, "encode", IMAGES[0])
        assert not alone.stream.transfer_params().kv
        held = Open(at, "prefill")
        kv = held.stream.transfer_params().kv
        assert (kv["do_remote_prefill"], kv["do_remote_decode"]) == (True, False)
        assert kv["lease_s"] == TIMING.kv_lease_s
        ((_, message), *_) = held.sent(PrefillRequest)[-1:]
        assert message.lease_s == TIMING.kv_lease_s
        nowhere = at.cluster.within(GATEWAY, at.role.admit)
        assert not nowhere.transfer_params().kv and not nowhere.transfer_params().ec
