"""What an encoder writes to the ranks of a group, and that they answer as one rank does."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.engine.base import Rows, SlotRows
from epd.groups.asks import RankLost, of_all
from epd.roles.encode.row_producer import RowProducer
from epd.roles.outgoing import Spread
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.engine.golden import ROW_NBYTES, Image
from epd_lab.sim.planes.transfer import Fabric, SimWrite
from epd_lab.sim.run import Plan, run
from epd_lab.sim.workload import Ask
from tests.roles.watching.test_gateway_metrics import samples_of

Told = Literal["sharded", "replicated"]
SIZES = ((1, 4, 4), (1, 2, 2), (1, 4, 6), (1, 6, 6), (1, 2, 10))  # 4, 1, 6, 9 and 5 rows


def played(topology: str, told: Told) -> tuple[list[Any], Counter[str], dict[str, float]]:
    """The answers, bytes of rows by the rank that they were written to, and what metrics say."""
    images = [Image(f"i{n}", size) for n, size in enumerate(SIZES)]
    asks = tuple(
        Ask(n, 1.0 + 0.01 * n, tuple(range(20, 50)), ((3, image), (9, images[n - 1])))
        for n, image in enumerate(images)
    )
    default = Settings()
    prefill = msgspec.structs.replace(default.prefill, rows_at_ranks=told)
    written: Counter[str] = Counter()
    clusters: list[Cluster] = []
    begin = Fabric.begin

    def seen(fabric: Fabric, write: SimWrite) -> None:
        if write.target.region_id == "rows":
            written[write.target.instance_id] += sum(v.nbytes for _, v in write.pieces)
        begin(fabric, write)

    settings = replace(default, prefill=prefill)
    plan = Plan(5, topology, asks, settings=settings)
    with mock.patch.object(Fabric, "begin", seen):
        result = run(plan, keep=True, prepare=lambda world, cluster: clusters.append(cluster))
    assert result.passed, result.violations
    links = samples_of(clusters[0], "epd_link_nbytes_total")
    assert result.world is not None
    result.world.close()
    to = {peer: nbytes for (source, peer, *_), nbytes in links.items() if source == "e0"}
    return [record.tokens for record in result.records], written, to


def test_an_encoder_sends_an_image_once_and_not_to_each_of_four_ranks() -> None:
    """Counted where it is written, and by the metric; all say what one rank says.  Images of fewer
    rows than ranks go to each."""
    alone, to_one, _ = played("1e1pd", "sharded")
    sharded, parts, counted = played("1e1pd:tp4", "sharded")
    replicated, copies, all_counted = played("1e1pd:tp4", "replicated")
    assert sharded == replicated == alone
    total = sum(to_one.values())
    assert sum(copies.values()) == 4 * total == all_counted["pd0"]
    few = ROW_NBYTES  # the image of one row
    assert sum(parts.values()) == total + 3 * few == counted["pd0"]
    assert (sum(parts.values()) - 4 * few) / (sum(copies.values()) - 4 * few) <= 0.27
    assert set(parts) == {"pd0", "pd0.1", "pd0.2", "pd0.3"}
    assert max(parts.values()) - min(parts.values()) <= len(SIZES) * ROW_NBYTES


@pytest.mark.parametrize("topology", ["2e:tp2,1pd:tp3", "3e2pd:tp2", "1e:tp3,1epd:tp2"])
def test_any_encoders_serve_any_group(topology: str) -> None:
    """N encoders to a group, one to several, and groups that encode."""
    alone, _, _ = played("1e1pd", "sharded")
    assert played(topology, "sharded")[0] == alone


@given(
    st.integers(1, 30), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans(),
    st.lists(st.integers(1, 7), max_size=5),
)  # fmt: skip
async def test_what_is_written_to_each_rank(
    num_rows: int, num_ranks: int, rows_per_slot: int, is_sharded: bool, by_reference: bool,
    sizes: list[int],
) -> None:  # fmt: skip
    """Whatever views the source consists of, or if it is handed on: each rank has its rows, in its
    first slots."""
    row_nbytes = 3
    data = bytes(i % 251 for i in range(num_rows * row_nbytes))
    tensor = np.frombuffer(data, np.uint8).reshape(num_rows, row_nbytes)
    rows = Rows(tensor if by_reference else data, num_rows, len(data))
    views, at = [], 0
    for size in (*sizes, len(data)):
        views.append(memoryview(data)[at : at + size])
        at += size
    told: dict[int, bytes] = {}

    async def write(source: list[Any], region: Any, slots: tuple[int, ...]) -> None:
        if by_reference:
            (one,) = source
            source = [one.holder.tensor.tobytes()]
            assert one.nbytes == one.holder.nbytes == len(source[0])
        told[region.rank] = b"".join(source)
        assert len(told[region.rank]) <= len(slots) * region.slot_nbytes
        assert slots == grant.slots[: len(slots)]

    regions = [
        SimpleNamespace(rank=rank, slot_nbytes=rows_per_slot * row_nbytes)
        for rank in range(num_ranks)
    ]
    slots = tuple(range(40, 40 + -(-num_rows // rows_per_slot)))
    grant: Any = SimpleNamespace(
        region=regions[0], parts=tuple(regions[1:]), slots=slots, is_sharded=is_sharded
    )
    ring = mock.Mock(copy=mock.AsyncMock(return_value=views))
    transfers = SimpleNamespace(takes_references=lambda region: by_reference, write=write)
    actor: Any = SimpleNamespace(
        ports=SimpleNamespace(transfers=transfers), is_self=lambda peer: False
    )
    producer = RowProducer(actor, mock.Mock(), mock.Mock(), ring, mock.Mock(), mock.Mock())
    outgoing: Any = SimpleNamespace(key="a", slots=(1,), grant=grant, peer="pd0")
    producer.sources["a"] = rows
    staged = await producer.stage(outgoing, grant)
    if num_ranks == 1:
        assert not isinstance(staged, Spread)
        return
    assert isinstance(staged, Spread)
    for part in staged.parts:
        await part()
    layout = SlotRows(slots, num_rows, is_sharded)
    for rank in range(num_ranks):
        held = layout.held(rank, num_ranks)
        assert told.get(rank, b"") == data[held.start * row_nbytes : held.stop * row_nbytes]


async def test_what_one_rank_failed_at_is_over_when_it_is_at_all() -> None:
    """Slots that another rank still reads are not free."""
    reads = asyncio.get_running_loop().create_future()

    async def lost() -> int:
        raise RankLost("rank 1 has ended")

    asked = asyncio.ensure_future(of_all([lost(), reads]))
    for _ in range(9):
        await asyncio.sleep(0)
    assert not asked.done()
    reads.set_result(3)
    with pytest.raises(RankLost):
        await asked
