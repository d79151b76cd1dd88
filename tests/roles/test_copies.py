"""Who is asked twice for what it has open: the copy is no news, whatever would be refused now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from epd.failure import Failure, FailureKind
from epd.fsm.membership import S
from epd.messages import (
    AbortEncode,
    CancelTransfer,
    EncodeRejected,
    EncodeRequest,
    KvOffer,
    Message,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
)
from epd.roles.compose import Instance
from epd.transport.base import Received
from epd_lab.sim.engine.golden import Image
from tests.fsm.tables import at as in_state
from tests.roles.simulated import simulated

REFUSALS = (AbortEncode, CancelTransfer, EncodeRejected, RequestAborted, RequestFailed)
ASKED = {"e0": EncodeRequest, "p0": PrefillRequest, "d0": KvOffer}


def drains(member: Instance) -> None:
    in_state(member.actor.memberships["gateway"], S.DRAINING)


def is_full(member: Instance) -> None:
    full = Failure(FailureKind.BUSY, "full")
    member.actor.refusal = mock.Mock(return_value=full)  # type: ignore[method-assign]


def does_not_know_the_time(member: Instance) -> None:
    in_state(member.actor.memberships["gateway"], S.JOINING)


@pytest.mark.parametrize("why", [drains, is_full, does_not_know_the_time])
@pytest.mark.parametrize("name", ASKED)
def test_a_copy_of_what_is_open_is_not_refused(name: str, why: Callable[..., Any]) -> None:
    kind = ASKED[name]
    with simulated("1e1p1d") as cluster:
        said: list[tuple[str, str, Message]] = []
        cluster.world.network.on_message.append(lambda *word: said.append(word))
        record = cluster.ask(Image("one"), max_tokens=8)
        while not any(isinstance(message, kind) for _, _, message in said):
            cluster.pass_time(1e-5)
        source, message = next((s, m) for s, _, m in said if isinstance(m, kind))
        cluster.pass_time(0.001)  # it has arrived, and is at work
        said.clear()
        copy = Received(source, cluster.node(source).process.epoch, message, (b"an image",))
        why(cluster.instance(name))
        cluster.within(name, cluster.instance(name).actor.take, copy)
        refused = [word for word in said if word[0] == name and type(word[2]) in REFUSALS]
        cluster.pass_time(1.0)
    assert not refused
    assert record.finish_reason and record.error is None
