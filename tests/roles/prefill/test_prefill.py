"""Encoders and prefill instances: who gets rows, and which messages are not said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.fsm.membership import S
from epd.fsm.request import AbortReceived
from epd.messages import Address, RequestFailed, RequestInquiry
from epd.transport.base import Received
from epd_lab.sim.client import Record
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from tests.fsm.tables import at as in_state
from tests.roles.simulated import Simulated, simulated
from tests.roles.test_member import told


def test_all_who_wait_for_an_image_get_it_when_it_is_encoded() -> None:
    """Two prefill instances have a room each for the same hash."""
    with simulated("1e2p1d") as cluster:
        records = [cluster.ask(Image("same"), max_tokens=3) for _ in range(4)]
        cluster.pass_time(1.0)
        encode = cluster.instance("e0").encode
        assert encode is not None and encode.num_encoded == 1
        assert [record.finish_reason for record in records] == ["length"] * 4
        prefilled = [cluster.instance(name).requests for name in ("p0", "p1")]
        assert all(r is not None and r.totals["prefix_cache_queried_tokens"] for r in prefilled), (
            "both did"
        )


def test_rows_that_have_come_are_not_called_off() -> None:
    with simulated("1e1p1d") as cluster:
        embeddings = cluster.instance("p0").embeddings
        assert embeddings is not None
        with mock.patch.object(embeddings, "dismiss", wraps=embeddings.dismiss) as dismiss:
            record = cluster.ask(Image("one"), Image("two"), max_tokens=3)
            cluster.pass_time(1.0)
        assert record.finish_reason
        dismiss.assert_not_called()


@pytest.mark.parametrize("missing", [True, False])
def test_only_who_still_lacks_rows_calls_its_rooms_off(missing: bool) -> None:
    """A request lets go of its images again after it gave way: its rows have come long ago."""
    with simulated("1e1p1d") as cluster:
        prefill, embeddings = cluster.instance("p0").prefill, cluster.instance("p0").embeddings
        assert prefill is not None and embeddings is not None
        item = SimpleNamespace(mm_hash="h", room="r/1/0")
        request: Any = SimpleNamespace(message=SimpleNamespace(items=(item,)), key="r/1", attempt=1)
        request.missing = {item.room} if missing else set()
        its = mock.patch.object(cluster.instance("p0").requests, "record")
        with its, mock.patch.object(embeddings, "dismiss") as dismiss:
            cluster.within("p0", prefill.release_embeddings, request, AbortReceived())
        assert dismiss.called == missing


def test_who_asks_after_what_has_ended_is_told_that_a_message_was_lost() -> None:
    with simulated("1e1p1d") as cluster:
        record = cluster.ask(max_tokens=3)
        cluster.pass_time(0.5)
        assert record.finish_reason
        requests = cluster.instance("d0").requests
        assert requests is not None
        for attempt, times in ((1, 1), (2, 1), (1, 2)):  # there was no second
            epoch = cluster.gateway.actor.address.epoch
            asked = Received(
                GATEWAY, epoch, RequestInquiry(request_id=record.request_id, attempt=attempt)
            )
            cluster.within("d0", requests.on_inquiry, asked)
            assert requests.actor.counters["last_message_lost"] == times


def breaks_a_step(cluster: Simulated) -> Record:
    cluster.node("p0").devices[0].fail_next = 1
    return cluster.ask(max_tokens=3)


def cannot_have_an_image(cluster: Simulated) -> Record:
    return cluster.ask(Image("bad", flaw="unencodable"), max_tokens=3)


def is_refused_by_decode(cluster: Simulated) -> Record:
    in_state(cluster.instance("d0").member.places[0].machine, S.DRAINING)
    return cluster.ask(max_tokens=3)


def loses_decode(cluster: Simulated) -> Record:
    record = cluster.ask(max_tokens=3)
    prefill = cluster.instance("p0")
    while not prefill.outgoing.live()["outgoing"]:
        cluster.pass_time(1e-4)
    told(cluster, "p0", (Address("d0", 1, ""),))
    return record


def has_another_gateway(cluster: Simulated) -> Record:
    """This one was silent for long, and reads again."""
    record = cluster.ask(Image("slow0"), max_tokens=3)
    cluster.pass_time(0.01)
    requests = cluster.instance("p0").requests
    assert requests is not None
    cluster.within("p0", requests.peer_lost, Address(GATEWAY, 1, ""))
    return record


def told_of(cluster: Simulated, record: Record) -> list[Any]:
    """What p0 tells who asks after a request that is no more there."""
    requests, epoch = cluster.instance("p0").requests, cluster.gateway.actor.address.epoch
    assert requests is not None and requests.get(f"{record.request_id}/1") is None
    asked = Received(GATEWAY, epoch, RequestInquiry(request_id=record.request_id, attempt=1))
    with mock.patch.object(requests.actor, "send") as send:
        cluster.within("p0", requests.on_inquiry, asked)
    return [call.args[1] for call in send.call_args_list]


@pytest.mark.parametrize(
    "fails",
    [breaks_a_step, cannot_have_an_image, is_refused_by_decode, loses_decode, has_another_gateway],
)
def test_what_has_failed_at_prefill_goes_on_nowhere(fails: Callable[[Simulated], Record]) -> None:
    """Who asks after it, because the message was lost, is told; not taken for one that decodes."""
    with simulated("1e1p1d") as cluster:
        cluster.world.network.block("p0", GATEWAY)  # or the gateway would call it off
        record = fails(cluster)
        cluster.pass_time(0.5)
        (word,) = told_of(cluster, record)
        assert isinstance(word, RequestFailed) and word.failure.retryable


def test_what_goes_on_at_decode_is_not_over_at_prefill() -> None:
    with simulated("1e1p1d") as cluster:
        record = cluster.ask(max_tokens=3)
        cluster.pass_time(0.5)
        assert told_of(cluster, record) == []


@pytest.mark.parametrize("flaw", ["broken", "unencodable"])
def test_an_encode_alone_that_fails_is_told(flaw: str) -> None:
    """Nobody else would tell of it: no prefill waits for its rows."""
    with simulated("1e1p1d") as cluster:
        record = cluster.ask(Image("bad", flaw=flaw), drives=True)
        cluster.pass_time(2.0)
        assert record.error is not None
