"""What an instance that drains is asked to hand over: what it offers, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epd.failure import FailureKind
from epd.fsm.request import Request, S
from epd.messages import (
    AbortRequest,
    Address,
    KvOffer,
    Message,
    MoveRequest,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
    TokenChunk,
    Tokens,
)
from epd.roles.steps.moves import Moves
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from tests.roles.desk import Desk, desk

HERE, THERE, FRONT = Address("pd0", 1, ""), Address("pd1", 1, ""), Address(GATEWAY, 1, "")
PROMPT = tuple(range(20, 31))


@pytest.fixture
def at() -> Iterator[Desk]:
    """pd0 decodes the first attempt of a request."""
    with desk("1e2pd", "pd0", "prefill") as at:
        due_s = at.actor.cluster_s() + 20.0
        message = PrefillRequest(
            request_id="r",
            attempt=1,
            token_ids=PROMPT,
            num_emitted=3,
            items=(),
            sampling=SamplingParams(max_tokens=100, seed=7),
            decode=HERE,
            gateway=FRONT,
            deadline_s=due_s,
            first_token_deadline_s=due_s,
        )
        at.do(at.role.on_prefill_request, Received(GATEWAY, 1, message, ()))
        at.cluster.pass_time(0.03)
        at.said.clear()
        yield at


def request(at: Desk, attempt: int) -> Request | None:
    return at.machine(Request, f"r/{attempt}")


def move(at: Desk, former: int = 1) -> None:
    due_s = at.actor.cluster_s() + 5.0
    asked = MoveRequest(
        request_id="r", attempt=2, former=former, decode=THERE, first_token_deadline_s=due_s
    )
    at.do(at.part(Moves).on_move_request, Received(GATEWAY, 1, asked, ()))


def of(at: Desk, kind: type[Message]) -> list[Message]:
    return [message for message in at.messages() if isinstance(message, kind)]


def chunks(at: Desk) -> list[TokenChunk]:
    return [chunk for m in at.messages() if isinstance(m, Tokens) for chunk in m.chunks]


def test_the_next_attempt_offers_all_that_the_former_one_has_computed(at: Desk) -> None:
    former = request(at, 1)
    assert former is not None and former.state is S.DECODING
    num_said = former.num_emitted + len(former.output)
    move(at)
    at.cluster.pass_time(0.05)
    (offer,) = of(at, KvOffer)
    assert isinstance(offer, KvOffer)
    assert (former.state, offer.attempt, offer.room) == (S.FINISHED, 2, "r/2/kv")
    said = [token for chunk in chunks(at) for token in chunk.token_ids]
    moved = request(at, 2)
    assert moved is not None and moved.state is S.TRANSFERRING
    assert [t.token_id for t in former.output[num_said - 3 : -1]] == said, "the last goes with KV"
    computed = (*PROMPT, *(t.token_id for t in former.output[:-1]))
    assert (offer.token_ids, offer.num_emitted) == (computed, 3 + len(former.output) - 1)
    assert moved.output == former.output[-1:]
    transfer = at.whole.outgoing.find("r/2/kv")
    assert transfer.kv.state.first_token == former.output[-1]
    move(at)  # a copy
    assert len(of(at, KvOffer)) == 1 and not of(at, RequestFailed)


def test_what_does_not_decode_here_is_refused(at: Desk) -> None:
    move(at, former=9)
    (failed,) = of(at, RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert (failed.attempt, failed.failure.kind) == (2, FailureKind.AWAY)
    assert request(at, 1) is not None and not of(at, KvOffer)


def test_an_abort_may_be_faster_than_the_last_step(at: Desk) -> None:
    """F42: what was called off is not begun, and its blocks are free."""
    move(at)
    former = request(at, 1)
    assert former is not None and former.state is S.MOVING
    at.do(
        at.whole.requests.on_abort,
        Received(GATEWAY, 1, AbortRequest(request_id="r", attempt=2), ()),
    )
    at.cluster.pass_time(0.05)
    assert not of(at, KvOffer) and request(at, 1) is None and request(at, 2) is None
    assert at.whole.requests.live() | {"waiting": 0} == dict.fromkeys(at.whole.requests.live(), 0)
