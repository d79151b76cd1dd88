"""Encoders and prefill instances: who gets rows, and which words are not said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.fsm.request import AbortReceived
from epd.messages import RequestInquiry
from epd.sim.cluster import GATEWAY
from epd.sim.golden import Picture
from epd.transport.base import Received
from tests.roles.simulated import simulated


def test_all_who_wait_for_a_picture_get_it_when_it_is_encoded() -> None:
    """Two prefill instances have a room each for the same hash."""
    with simulated("1e2p1d") as cluster:
        records = [cluster.ask(Picture("same"), max_tokens=3) for _ in range(4)]
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
            record = cluster.ask(Picture("one"), Picture("two"), max_tokens=3)
            cluster.pass_time(1.0)
        assert record.finish_reason
        dismiss.assert_not_called()


@pytest.mark.parametrize("missing", [True, False])
def test_only_who_still_lacks_rows_calls_its_rooms_off(missing: bool) -> None:
    """A request lets go of its pictures again after it gave way: its rows have come long ago."""
    with simulated("1e1p1d") as cluster:
        prefill, embeddings = cluster.instance("p0").prefill, cluster.instance("p0").embeddings
        assert prefill is not None and embeddings is not None
        item = SimpleNamespace(mm_hash="h", room="r/1/0")
        request: Any = SimpleNamespace(
            message=SimpleNamespace(items=(item,)), rows={}, key="r/1", attempt=1
        )
        request.missing = {item.room} if missing else set()
        with mock.patch.object(embeddings, "dismiss") as dismiss:
            cluster.within("p0", prefill.release_embeddings, request, AbortReceived())
        assert dismiss.called == missing


def test_who_asks_after_what_has_ended_is_told_that_a_word_was_lost() -> None:
    with simulated("1e1p1d") as cluster:
        record = cluster.ask(max_tokens=3)
        cluster.pass_time(0.5)
        assert record.finish_reason
        requests = cluster.instance("d0").requests
        assert requests is not None
        for attempt, times in ((1, 1), (2, 1), (1, 2)):  # there was no second
            epoch = cluster.gateway.actor.address.epoch
            asked = Received(GATEWAY, epoch, RequestInquiry(record.request_id, attempt))
            cluster.within("d0", requests.on_inquiry, asked)
            assert requests.actor.counters["last_word_lost"] == times
