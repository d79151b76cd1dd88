"""The transport of a pair follows from what both offer, alike for both, or the join is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epd.messages import Address, InstanceInfo, TransportLack, TransportOffer
from epd.scheduling.pairing import HOPS, choose, common, exchange, fallback, objection


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


ON_GPU = {"cuda": "A:0", **HOST_A}
NO_CUDA = TransportLack(name="cuda", reason="the driver is too old")
NO_MOONCAKE = TransportLack(name="mooncake", reason="libnuma is missing")


@pytest.mark.parametrize(
    ("its", "lack", "is_here", "reason"),
    [
        (ON_GPU, None, True, ""),
        (HOST_A, NO_CUDA, True, "not cuda: p0 lacks it: the driver is too old"),
        (HOST_A, None, True, ""),  # it computes on a CPU, or was started with --transport
        ({**ON_GPU, "cuda": "A:1"}, None, True, "not cuda: both are on one host, but their GPUs"),
        ({**HOST_B, "cuda": "B:0"}, None, False, ""),
        ({"shm": "B", "tcp": ""}, NO_MOONCAKE, False, "not mooncake: p0 lacks it: libnuma"),
        ({"shm": "B", "tcp": ""}, None, False, ""),  # --transport shm,tcp
        (HOST_B, NO_CUDA, False, ""),  # it would not lead there
    ],
)
def test_a_pair_falls_back_where_something_is_missing(
    its: dict[str, str], lack: TransportLack | None, is_here: bool, reason: str
) -> None:
    e0, p0 = instance("e0", "encode", **ON_GPU), instance("p0", "prefill", **its)
    lacks = (lack,) if lack else ()
    p0 = replace(p0, lacks=lacks, host_id="host:7" if is_here else "another:7")
    assert fallback(e0, p0) == fallback(p0, e0)
    assert fallback(e0, p0).startswith(reason) and bool(fallback(e0, p0)) == bool(reason)


def test_both_of_a_host_may_lack_it() -> None:
    lacks = (NO_CUDA,)
    pair = [replace(instance(name, *HOPS[0], **HOST_A), lacks=lacks) for name in ("a", "b")]
    assert fallback(*pair) == "not cuda: a lacks it: the driver is too old"
    far = replace(pair[1], host_id="another")
    assert fallback(pair[0], far) == ""
