"""Requests with an adapter go where that is held."""

from __future__ import annotations

import msgspec

from epd.messages import Load
from epd.scheduling.placement import Unplaceable, holding
from epd_lab.sim.engine import golden
from tests.scheduling.test_placement import candidate, place


def test_an_adapter_is_asked_of_whom_it_changes() -> None:
    """Who lacks it is passed over for prefill and decode; an encoder, where it changes towers."""
    pool = [candidate("e0", "encode"), *(candidate(n, "prefill", "decode") for n in ("a", "b"))]
    for one, held in zip(pool, ((), ("pirate",), ("poet",)), strict=True):
        if one.roles != ("encode",):
            one.info = msgspec.structs.replace(one.info, kv_layout=golden.KV_LAYOUT)
        one.load = Load(adapters=held)
    assert holding(pool, "") == pool
    assert [c.instance_id for c in holding(pool, "poet")] == ["e0", "b"]
    assert [c.instance_id for c in holding(pool, "poet", changes_tower=True)] == ["b"]
    pool[0].load = Load(adapters=("poet",))
    found = holding(pool, "poet", changes_tower=True)
    assert [c.instance_id for c in found] == ["e0", "b"]
    assert place(holding(pool, "none"), []) == Unplaceable(
        "no healthy instance has the role prefill or decode"
    )
