"""Second turns go to where their first turns are, unless that instance is overloaded or gone.

On virtual time: eight conversations on 2e2p2d, each of a text that nobody else has and an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from epd.roles.gateway.affinity import Affinity
from epd.scheduling.placement import Shares
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.drills.drill import NOTHING
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.engine.sampler import FIRST_WORD
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import Plan, Prepare, Result, run
from epd_lab.sim.workload import Ask

NUM = 8
ROOMY = replace(Settings(), num_blocks=1024)


def words(length: int, first: int) -> tuple[int, ...]:
    return tuple(FIRST_WORD + (first * 37 + n) % 900 for n in range(length))


def conversations() -> list[Ask]:
    """First turns one after the other; then second turns in another order, while some still run."""
    asks = []
    for n in range(NUM):
        image = ((4, Image(f"image{n}")),)
        asks.append(Ask(n, 1.0 + 0.02 * n, words(160, n), image, max_tokens=4))
        more = words(160, n) + words(12, 100 + n)
        asks.append(Ask(NUM + n, 4.0 + 0.06 * (n * 5 % NUM), more, image, max_tokens=4))
    return asks


def play(
    asks: list[Ask],
    faults: tuple[Fault, ...] = (),
    prepare: Prepare | None = None,
    **settings: object,
) -> Result:
    changed = replace(ROOMY, **settings)  # type: ignore[arg-type]
    plan = Plan(3, "2e2p2d", tuple(asks), faults, Conditions(), DataConditions(), changed, NOTHING)
    result = run(plan, prepare=prepare)
    assert not result.violations, result.violations[:3]
    return result


def test_second_turns_find_their_first_ones() -> None:
    with_affinity = play(conversations())
    assert with_affinity.fired["prefix_hit"] == NUM, "at prefill"
    assert with_affinity.fired["kv_held"] == NUM, "at decode"
    without = play(conversations(), prefix_affinity=False)
    assert without.fired["prefix_hit"] < NUM and without.fired["kv_held"] < NUM


def test_a_beginning_that_everybody_has_does_not_overload_who_holds_it() -> None:
    """One first turn, then all at once with the same beginning: both prefills get work, when what
    waits where it is held takes longer than to compute it elsewhere."""
    first = Ask(0, 1.0, words(160, 1), max_tokens=4)
    rest = [Ask(1 + n, 3.0, words(160, 1) + words(12, n), max_tokens=4) for n in range(40)]
    clusters: list[Cluster] = []
    result = play([first, *rest], prepare=lambda world, cluster: clusters.append(cluster))
    assert result.fired["prefix_hit"] >= 4, "who holds it gets more"
    for name in ("p0", "p1"):
        instance = clusters[0].nodes[f"{name}:1"].instance
        assert instance is not None and instance.requests is not None
        assert instance.requests.totals["prefix_cache_queried_tokens"] > 160


def test_two_tenants_with_one_prompt_share_nothing() -> None:
    """The second finds it neither at prefill nor at decode, and is not sent there (F53)."""
    shares: dict[str, Shares] = {}
    found = Affinity.shares

    def seen(self: Affinity, machine: Any, *asked: Any) -> Shares:
        return shares.setdefault(machine.key, found(self, machine, *asked))

    tenants = ("alice", "bob", "alice")
    text = words(160, 1)
    asks = [Ask(n, 1.0 + n, text, max_tokens=4, tenant=who) for n, who in enumerate(tenants)]
    with mock.patch.object(Affinity, "shares", seen):
        first_two = play(asks[:2])
        assert not first_two.fired["prefix_hit"] and not first_two.fired["kv_held"]
        assert not any([*shares.values()][:2]), "nor does the gateway know of anything"
        shares.clear()
        third = play(asks)
    assert third.fired["prefix_hit"] == third.fired["kv_held"] == 1, "its own it finds"
    assert [bool(share) for share in shares.values()][:3] == [False, False, True]


@pytest.mark.parametrize("kind", ["kill", "drain"])
def test_who_is_gone_is_asked_no_more(kind: str) -> None:
    """The first life of p0 has gone; its successor is not believed to know anything."""
    result = play(conversations(), faults=(Fault(kind, "p0", at_s=2.5, duration_s=0.3),))
    assert 0 < result.fired["prefix_hit"] <= NUM
    assert result.fired["kv_held"] == NUM, "the decodes are still there"
