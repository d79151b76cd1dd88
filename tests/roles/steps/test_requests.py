"""The requests of one instance: their messages, their places in the queue, and how they give
way."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from epd.engine.base import StepFailure
from epd.failure import Failure, FailureKind
from epd.fsm import request as fsm
from epd.fsm.incoming import BlocksLeased
from epd.fsm.request import Request, S
from epd.messages import (
    AbortRequest,
    Address,
    PrefillRequest,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RequestInquiry,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)
from epd.roles.steps import attempts as roles_attempts
from epd.roles.steps import requests as roles_requests
from epd.roles.steps.record import PRIORITY_S, TOKEN_S
from epd.roles.steps.speculation import Speculation
from epd.roles.steps.step_loop import Part, StepLoop
from epd.scheduling.batching import Admission, BatchScheduler
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
HERE = "epd0"
LOST = Failure(FailureKind.LOST, "its last message was lost")


def requests() -> Any:
    return desk("1epd", HERE, "requests")


def prompt(at: Desk, request_id: str, **other: Any) -> PrefillRequest:
    due_s = at.cluster.gateway.actor.cluster_s() + 30.0
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "token_ids": (11, 12, 13),
        "num_emitted": 0,
        "items": (),
        "sampling": SamplingParams(max_tokens=8),
        "decode": at.actor.address,
        "gateway": Address(GATEWAY, 1, ""),
        "deadline_s": due_s,
        "first_token_deadline_s": due_s,
    }
    return PrefillRequest(**{**fields, **other})


def begin(at: Desk, request_id: str = "r", **other: Any) -> Request:
    """It stands in line, or is in a step already."""
    prefill = at.cluster.instance(HERE).prefill
    assert prefill is not None
    message = prompt(at, request_id, **other)
    at.do(prefill.on_prefill_request, Received(GATEWAY, 1, message, ()))
    request: Request = at.role.get(f"{request_id}/1")
    return request


def hang(at: Desk) -> None:
    at.cluster.node(HERE).devices[0].hung = True


def abort(at: Desk, request_id: str, attempt: int = 1) -> list[Any]:
    return at.tell("on_abort", AbortRequest(request_id=request_id, attempt=attempt), GATEWAY)


def test_who_is_called_off_before_it_came_is_not_begun() -> None:
    """F42."""
    with requests() as at:
        assert abort(at, "r") == [RequestAborted(request_id="r", attempt=1)]
        assert at.said == [(GATEWAY, RequestAborted(request_id="r", attempt=1))]
        assert at.role.has_ended("r/1") and begin(at) is None


def test_who_is_called_off_ends() -> None:
    with requests() as at:
        hang(at)
        one, two = begin(at, "a"), begin(at, "b")
        assert abort(at, "a") == [RequestAborted(request_id="a", attempt=1)], "once"
        assert (one.ended_for_client, two.ended_for_client) == (True, False)
        assert one.state is S.ABORTING, "the step owns its blocks"
        assert abort(at, "a") == [RequestAborted(request_id="a", attempt=1)], "it was lost"


def test_tombstones_are_bounded_and_the_oldest_goes() -> None:
    with requests() as at, mock.patch.object(roles_attempts, "MAX_TOMBSTONES", 2):
        for name in "abc":
            abort(at, name)
        assert [at.role.has_ended(f"{name}/1") for name in "abc"] == [False, True, True]


def inquiry(at: Desk, request_id: str) -> list[Any]:
    return at.tell("on_inquiry", RequestInquiry(request_id=request_id, attempt=1), GATEWAY)


def test_who_inquires_is_told_what_waits_and_what_has_ended_and_else_nothing() -> None:
    with requests() as at:
        lost = RequestFailed(request_id="a", attempt=1, failure=LOST)
        hang(at)
        request = begin(at, "a")
        assert inquiry(at, "a") == [RequestAccepted(request_id="a", attempt=1)], "it waits here"
        at.role.record(request).num_sent = 1
        assert inquiry(at, "a") == [] and inquiry(at, "never heard of") == [], "its tokens say so"
        abort(at, "a")
        assert inquiry(at, "a") == [lost], "for its client it has"
        abort(at, "b")
        assert inquiry(at, "b") == [RequestFailed(request_id="b", attempt=1, failure=LOST)]
        assert at.actor.counters["last_message_lost"] == 2


def test_the_end_of_a_gateways_life_ends_its_requests() -> None:
    with requests() as at:
        hang(at)
        other = Address("gateway2", 1, "")
        at.actor.memberships["gateway2"] = at.actor.memberships[GATEWAY]
        found = [begin(at, "a"), begin(at, "b"), begin(at, "c", gateway=other)]
        for address in (Address(GATEWAY, 2, ""), Address("x", 1, "")):
            at.do(at.role.peer_lost, address)
            assert not any(request.ended_for_client for request in found)
        at.do(at.role.peer_lost, Address(GATEWAY, 1, ""))
        assert [request.ended_for_client for request in found] == [True, True, False]


def test_who_is_silent_says_that_it_is_there() -> None:
    """In a queue, or before its first token; tokens that were not sent are sent."""
    with requests() as at:
        hang(at)
        request = begin(at)
        here = [RequestAccepted(request_id="r", attempt=1)]
        assert inquiry(at, "r") == here and at.said[0][0] == GATEWAY
        request.output.append(TokenLogprobs(5, 0.0))
        (tokens,) = inquiry(at, "r")
        assert isinstance(tokens, Tokens) and tokens.chunks[0].token_ids == (5,)
        assert inquiry(at, "r") == [], "its next token will say so"
        with mock.patch.object(BatchScheduler, "waits", return_value=True):
            assert inquiry(at, "r") == here
        request.decode_here, at.role.record(request).num_sent = False, 0
        assert inquiry(at, "r") == here, "its first token is decode's to say"


def test_a_request_that_nothing_is_heard_of_is_ended_by_its_deadline() -> None:
    with requests() as at, mock.patch.object(BatchScheduler, "admissions", return_value=()):
        due_s = at.cluster.gateway.actor.cluster_s() + 0.5
        request = begin(at, deadline_s=due_s)
        at.cluster.pass_time(0.49)
        assert not request.terminal
        at.cluster.pass_time(0.02)
        (failed,) = [m for m in at.messages() if isinstance(m, RequestFailed)]
        assert failed.failure.kind is FailureKind.DEADLINE and request.terminal
        assert not [name for name in at.actor.timers if name.startswith("REQUEST")]
        assert not at.role.live()["requests"] and at.role.has_ended("r/1")


def test_an_abort_that_a_hung_device_holds_up_is_told_of_again_and_again() -> None:
    with requests() as at:
        hang(at)
        request = begin(at)
        abort(at, "r")
        assert at.actor.counters["device_hangs"] == 0
        for count in (1, 2):
            at.cluster.pass_time(TIMING.abort_timeout_s + 0.01)
            assert at.actor.counters["device_hangs"] == count
        assert not at.messages()[1:], "who is called off shows no sign of life"
        assert any("waits for its step" in line for line in at.cluster.node(HERE).warnings)
        assert request.state is S.ABORTING and request.block_table
        at.cluster.node(HERE).devices[0].release()
        at.cluster.pass_time(0.1)
        assert at.role.pool.num_leased == 0 and not at.actor.timers.runs(request, fsm.GraceEnded)


# --- places in the queue --------------------------------------------------------------------------


def test_a_rank_is_arrival_and_priority_and_what_the_prompt_costs() -> None:
    with requests() as at:
        hang(at)
        urgent = SamplingParams(max_tokens=8, priority=-2)
        now_s = at.actor.clock.now_s()
        calm = begin(at, "a")
        assert calm.rank == now_s + TOKEN_S * len(calm.prompt) and calm.prompt
        soon = begin(at, "b", sampling=urgent)
        assert soon.rank == pytest.approx(calm.rank - 2 * PRIORITY_S)


def test_which_blocks_a_request_may_find() -> None:
    """Its full blocks; none where the log-probabilities of its prompt are asked for."""
    with requests() as at:
        hang(at)
        long = tuple(range(20, 29))
        for name, sampling, num_keys in (
            ("a", SamplingParams(max_tokens=8), 2),
            ("b", SamplingParams(max_tokens=8, num_prompt_logprobs=0), 0),
        ):
            with mock.patch.object(BatchScheduler, "add") as add:
                request = begin(at, name, sampling=sampling, token_ids=long)
            assert add.call_args.args[0] is request and len(add.call_args.args[1]) == num_keys


def test_kv_that_will_be_received_goes_before_prompts() -> None:
    with requests() as at:
        hang(at)
        request = begin(at, token_ids=tuple(range(20, 29)))
        at.role.on_reserved = granted = mock.Mock()
        pump, reserve = mock.patch.object(at.role, "pump"), BatchScheduler.reserve
        spied = mock.patch.object(BatchScheduler, "reserve", autospec=True, side_effect=reserve)
        with pump as pumped, spied as reserved:
            at.do(at.role.reserve, request)
        _, one, keys = reserved.call_args.args
        assert pumped.called and one is request and len(keys) == 2
        before = Counter(at.role.totals)
        at.do(at.role.pump)
        one, leased = granted.call_args.args
        assert (one, len(leased.blocks), leased.num_held) == (request, 3, 0)
        assert at.role.totals["prefix_cache_queried_tokens"] == (
            before["prefix_cache_queried_tokens"] + 9
        )
        at.do(at.role.pump)
        granted.assert_called_once()


@pytest.mark.parametrize("stood", [True, False])
def test_who_leaves_the_queue_lets_the_next_one_in(*, stood: bool) -> None:
    with requests() as at:
        hang(at)
        request = begin(at)
        at.do(at.role.leave_queue, "r/1")
        with mock.patch.object(at.role, "pump") as pump:
            if stood:
                at.do(at.role.reserve, request)
            pump.reset_mock()
            at.do(at.role.leave_queue, "r/1")
        assert pump.called == stood


def test_blocks_that_come_back_let_the_next_one_in() -> None:
    with requests() as at, mock.patch.object(at.role, "pump") as pump:
        at.do(at.role.return_blocks, at.role.pool.take(2))
        assert pump.called and at.role.pool.num_leased == 0


def test_a_sequence_takes_as_many_drafts_as_its_part_has_room_for() -> None:
    with requests() as at:
        request = begin(at)
        record = at.role.record(request)
        record.drafts = (5, 6, 7)
        for decoding, known, drafts in ((True, 1, (5, 6)), (False, 3, ())):
            with mock.patch.object(roles_requests, "sequence_of") as made:
                at.role.sequence(request, 3, decoding=decoding)
            made.assert_called_once_with(request, record, known, drafts, 0)


def test_who_is_in_a_step_cannot_give_way_and_is_asked_once() -> None:
    with requests() as at:
        hang(at)
        request = begin(at)
        assert request.steps
        victims = mock.patch.object(BatchScheduler, "victim", return_value=request)
        with victims as victim, mock.patch.object(BatchScheduler, "plan") as plan:
            assert at.do(lambda: at.role.plan(alone=False)) == [] and not plan.called
            assert victim.call_count == 1
            at.do(lambda: at.role.plan(alone=True))
            victim.return_value = None
            at.do(lambda: at.role.plan(alone=False))
            assert plan.call_count == 2, "nobody lacks a block"
        assert at.role.totals["preemptions"] == 0


def test_who_leaves_before_its_first_token_gives_back_all_blocks_of_states() -> None:
    with requests() as at, mock.patch.object(StepLoop, "wake"):
        request, pool = begin(at), at.role.pool
        at.do(at.role.pump)
        found, kept = pool.take(2), pool.take(2)
        at.role.record(request).states = [found, kept]
        at.do(at.role.fire, request, fsm.AbortReceived())
        assert request.state is S.FINISHED and pool.num_leased == 0


# --- steps ----------------------------------------------------------------------------------------


def launched(at: Desk, request: Request, count: int, *, decoding: bool) -> Part:
    at.do(lambda: at.role.launched(request, count, ahead=False))
    return Part(request, count, decoding)


def settled(at: Desk, *outcomes: Any) -> list[Request]:
    """A step of as many requests is over so; it is the only one."""
    with mock.patch.object(StepLoop, "wake"):
        made = [begin(at, f"s{n}") for n in range(len(outcomes))]
        at.do(at.role.pump)
        at.said.clear()
        step = [launched(at, r, 3, decoding=False) for r in made]
        at.do(at.role.settle, list(zip(step, outcomes, strict=True)), 0.1)
    return made


def test_tokens_of_one_step_leave_in_one_message() -> None:
    with requests() as at:
        first, _ = settled(at, TokenLogprobs(21, 0.0), TokenLogprobs(22, 0.0))
        chunks = (
            TokenChunk(request_id=f"s{n}", attempt=1, start=0, token_ids=(21 + n,)) for n in (0, 1)
        )
        assert at.said == [(GATEWAY, Tokens(chunks=tuple(chunks)))]
        first.output.append(TokenLogprobs(23, 0.0))
        (late,) = inquiry(at, "s0")
        assert [(one.start, one.token_ids) for one in late.chunks] == [(1, (23,))], "at once"


def test_an_outcome_fails_its_own_request_alone() -> None:
    with requests() as at:
        failed, fine = settled(at, StepFailure("bad numbers"), TokenLogprobs(22, 0.0))
        assert failed.state is S.FAILED and fine.state is S.DECODING
        assert failed.failure == Failure(FailureKind.ENGINE, "bad numbers")


def test_what_a_step_computed_for_whom_has_left_only_lets_go() -> None:
    with requests() as at:
        hang(at)
        request = begin(at)
        at.said.clear()
        with mock.patch.object(StepLoop, "wake"):
            part = Part(request, 3, decoding=False)
            at.do(at.role.fire, request, fsm.AbortReceived())
            at.said.clear()
            at.do(at.role.settle, [(part, TokenLogprobs(21, 0.0))], 0.1)
        assert not at.said and request.state is S.FINISHED and at.role.pool.num_leased == 0


def test_all_who_decode_may_draft_and_are_told_what_came_of_it() -> None:
    with requests() as at:
        said = TokenLogprobs(21, 0.0), TokenLogprobs(22, 0.0)
        both = settled(at, *said)
        on = mock.patch.object(Speculation, "is_on", True)
        drafts = mock.patch.object(Speculation, "draft", return_value=False)
        with on, drafts as draft, mock.patch.object(StepLoop, "wake"):
            at.do(lambda: at.role.plan(alone=True))
        assert draft.call_args_list == [
            mock.call(request, at.role.record(request), has_room=True) for request in both
        ]
        step = [
            (launched(at, both[0], 3, decoding=True), said),
            (launched(at, both[1], 1, decoding=True), said[0]),
        ]
        verifies = mock.patch.object(Speculation, "verified")
        with verifies as verified, mock.patch.object(StepLoop, "wake"):
            at.do(at.role.settle, step, 0.1)
        verified.assert_called_once_with(at.role.record(both[0]), 2, said)


@pytest.mark.parametrize("received", [True, False])
def test_what_is_found_in_the_cache_is_counted(*, received: bool) -> None:
    with requests() as at:
        hang(at)
        request = begin(at, token_ids=tuple(range(20, 29)))
        at.role.totals.clear()
        at.role.on_reserved = granted = mock.Mock()
        found = [Admission(request, (1, 2, 3), 5, received)]
        with (
            mock.patch.object(BatchScheduler, "admissions", return_value=found),
            mock.patch.object(at.role, "fire") as fire,
        ):
            at.do(at.role.pump)
        assert at.role.totals == {"prefix_cache_queried_tokens": 9, "prefix_cache_hit_tokens": 5}
        if received:
            granted.assert_called_once_with(request, BlocksLeased((1, 2, 3), 2))
        else:
            fire.assert_called_once_with(request, fsm.Scheduled((1, 2, 3), 5))


def test_the_step_loop_is_woken_while_somebody_runs() -> None:
    with requests() as at:
        hang(at)
        with mock.patch.object(StepLoop, "wake") as wake:
            at.do(at.role.pump)
            assert not wake.called
            begin(at)
            wake.reset_mock()
            at.do(at.role.pump)
            assert wake.called
