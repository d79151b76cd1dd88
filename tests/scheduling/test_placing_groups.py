"""Placement among groups of ranks: KV does not move between them, however busy one is."""

from __future__ import annotations

import pytest

from epd.messages import Address, InstanceInfo, Load
from epd.scheduling.fixed_rule import FixedRule
from epd.scheduling.placement import Asked, Candidate, Placement, place


def candidate(name: str, num_ranks: int, assigned: int = 0) -> Candidate:
    info = InstanceInfo(
        address=Address(name, 1, f"ipc://{name}"),
        roles=("prefill", "decode"),
        host_id="host",
        pid=1,
        num_ranks=num_ranks,
    )
    return Candidate(info, Load(), assigned)


@pytest.mark.parametrize(("num_ranks", "decode"), [(1, "pd1"), (2, "pd0")])
def test_a_group_decodes_what_it_prefills(num_ranks: int, decode: str) -> None:
    pool = [candidate("pd0", num_ranks, assigned=5), candidate("pd1", num_ranks)]
    chosen = place(pool, Asked(), FixedRule, at="pd0")
    assert isinstance(chosen, Placement)
    assert chosen.prefill.instance_id == "pd0" and chosen.decode.instance_id == decode
