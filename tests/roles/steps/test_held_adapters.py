"""An instance and the gateway's list of adapters."""

from __future__ import annotations

from typing import Any

from epd.failure import FailureKind
from epd.messages import AdapterList, RequestAborted, RequestFailed
from tests.roles.desk import Desk, desk
from tests.roles.gateway.test_adapters import SETTINGS
from tests.roles.test_refusals import prompt, refused


def listed(at: Desk, serial: int, *names: str, epoch: int = 1) -> list[Any]:
    adapters = tuple((name, name, name, False) for name in names)
    message = AdapterList(serial=serial, adapters=adapters)
    return at.tell("on_list", message, "gateway", epoch=epoch)


def told(at: Desk) -> tuple[Any, ...]:
    """In its next heartbeat."""
    load = at.whole.load()
    return load.adapter_list, load.adapters, load.unheld


def test_what_a_heartbeat_has_of_a_list() -> None:
    with desk("1e1p1d", "p0", "adapters", SETTINGS) as at:
        serial = told(at)[0][1]
        at.cluster.cluster.node("p0").language.spoiled = frozenset(("poor",))
        listed(at, serial + 1, "pirate", "poor")
        assert told(at) == ((1, serial), (), ())  # what is not listed is not for new requests
        at.cluster.pass_time(1.0)
        now = ((1, serial + 1), ("pirate",), (("poor", "it has other files here"),))
        assert told(at) == now
        for late in (serial, serial + 1):  # a copy, or overtaken
            listed(at, late)
            at.cluster.pass_time(1.0)
            assert told(at) == now
        listed(at, serial + 2)
        at.cluster.pass_time(1.0)
        assert told(at) == ((1, serial + 2), (), ())


def test_requests_of_what_is_not_listed_end_with_a_sentence() -> None:
    """And no other: a bystander, one of another adapter, one that comes later."""
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        serial = told(at)[0][1]
        at.role = at.whole.adapters
        listed(at, serial + 1, "poet", "pirate")
        at.cluster.pass_time(1.0)
        at.role = at.whole.prefill
        for name, adapter in (("one", "pirate"), ("two", "poet"), ("three", "")):
            assert refused(at, prompt(at, name, adapter=adapter)) is None
        at.role = at.whole.adapters
        said = listed(at, serial + 2, "poet")
        failed = [one for one in said if isinstance(one, RequestFailed)]
        assert [one.request_id for one in failed] == ["one"]
        assert failed[0].failure.kind is FailureKind.UNAVAILABLE
        assert "was unloaded" in failed[0].failure.reason
        assert [m.request_id for m in said if isinstance(m, RequestAborted)] == ["one"]
        open_ones = [one for one in at.whole.requests if not one.ended_for_client]
        assert [one.request_id for one in open_ones] == ["two", "three"]
        at.role = at.whole.prefill
        assert refused(at, prompt(at, "four", adapter="pirate")) == ("contract", False)


def test_a_former_gateway_is_not_followed() -> None:
    with desk("1e1p1d", "d0", "adapters", SETTINGS) as at:
        before = told(at)
        at.whole.member.places[0].machine.gateway_epoch = 2
        listed(at, before[0][1] + 1, "pirate")
        at.cluster.pass_time(1.0)
        assert told(at) == before
