"""The transport of a pair follows from what both offer, alike for both, or the join is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.messages import Address, InstanceInfo, TransportOffer
from epd.scheduling.pairing import choose, common, exchange, objection


def instance(name: str, *roles: str, **domains: str) -> InstanceInfo:
    offers = tuple(TransportOffer(name=k, domain=v) for k, v in domains.items())
    return InstanceInfo(
        address=Address(name, 1, ""), roles=roles, host_id="host", pid=1, transports=offers
    )


HOST_A = {"shm": "A", "mooncake": "", "tcp": ""}
HOST_B = {"shm": "B", "mooncake": "", "tcp": ""}


@pytest.mark.parametrize(
    ("own", "its", "chosen"),
    [
        ({"local": "A:1", **HOST_A}, {"local": "A:1", **HOST_A}, "local"),
        ({"local": "A:1", **HOST_A}, {"local": "A:2", **HOST_A}, "shm"),
        (HOST_A, HOST_B, "mooncake"),
        (HOST_A, {"shm": "B", "tcp": ""}, "tcp"),
        ({"shm": "A", "file": "t"}, {"shm": "B", "file": "t"}, "file"),
        ({"shm": "A", "file": "t"}, {"shm": "B", "file": "u"}, ""),  # not the same directory
        ({"shm": "A", "tcp": "net1"}, {"shm": "B", "tcp": "net2"}, ""),  # loopbacks of their own
        ({"tcp": ""}, HOST_A, "tcp"),  # forced on one side
    ],
)
def test_the_best_that_both_offer(own: dict[str, str], its: dict[str, str], chosen: str) -> None:
    e0, p0 = instance("e0", "encode", **own), instance("p0", "prefill", **its)
    assert choose(e0, p0) == choose(p0, e0) == chosen
    assert bool(objection(e0, p0)) == (not chosen)


@given(st.permutations(["local", "shm", "mooncake", "tcp"]), st.permutations([*HOST_A]))
def test_both_choose_alike_though_they_list_differently(own: list[str], its: list[str]) -> None:
    """As two versions might."""
    e0 = instance("e0", "encode", **dict.fromkeys(own, ""))
    p0 = instance("p0", "prefill", **dict.fromkeys(its, ""))
    assert choose(e0, p0) == choose(p0, e0)
    assert common(e0.transports, p0.transports) == common(p0.transports, e0.transports)


def test_a_refusal_names_both_lists() -> None:
    text = objection(instance("p0", "prefill", shm="A"), instance("e0", "encode", tcp=""))
    assert "p0 offers shm (A); e0 offers tcp" in text and "--transport" in text


def test_who_never_exchanges_needs_no_transport() -> None:
    e0, e1, d0 = instance("e0", "encode"), instance("e1", "encode"), instance("d0", "decode")
    assert not objection(e0, e1) and not objection(e0, d0)
    assert exchange(instance("pd0", "prefill", "decode"), instance("pd1", "prefill", "decode"))
