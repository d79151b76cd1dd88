"""KV and states from groups to groups of any sizes: what the ranks write and take in."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from epd.engine.adapter import ModelAdapter, adapter_for
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.kv_pool import KvPool
from epd.groups.asks import Answer, AnyAsk, Fence, Holds, RankLost, Settle
from epd.groups.data import GroupDataPlane, RankPart
from epd.groups.kv import KvRanks, Sent
from epd.messages import Address, Grant, RemoteRegion
from epd.model_files.checkpoint import read_checkpoint
from epd.transport.backend import BackendSettings
from epd.transport.base import WriteUnknown, Written
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine
from tests.engine.language.states import (
    assert_equal,
    cut_from,
    drawn,
    pool_of,
    rank_of,
    read,
    write,
)
from tests.engine.tiny_models import cached_model

NUM_BLOCKS = 3  # of a prompt


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    found = adapter_for(read_checkpoint(cached_model("qwen3_5")))
    found.text_config.num_attention_heads = 6
    found.text_config.num_key_value_heads = 3
    return found


class Pools:
    """An engine that computes nothing."""

    kv_in_place = True
    kv_memory = None
    fetch_kv = TorchLanguageEngine.fetch_kv
    land_kv = TorchLanguageEngine.land_kv
    fetch_state = TorchLanguageEngine.fetch_state
    land_state = TorchLanguageEngine.land_state
    _heads = TorchLanguageEngine._heads
    _hop = None

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.kv_layout = pool.layout
        self.num_landing_blocks = pool.num_blocks

    def attach_kv(self, buffer: memoryview) -> None:
        self.pool.attach(buffer)


class Group:
    """The ranks of an instance."""

    def __init__(self, name: str, adapter: ModelAdapter, size: int, memory: LocalMemory) -> None:
        self.joined: dict[int, Any] = {}
        self.places = ()
        self.pools = [pool_of(adapter, rank_of(rank, size), NUM_BLOCKS) for rank in range(size)]
        self.planes = [
            RoutingTransferEngine(BackendSettings(f"{name}{rank}", 1), memory, checksums="always")
            for rank in range(size)
        ]
        engines: list[Any] = [Pools(pool) for pool in self.pools]
        self.kv = KvRanks(engines[0], self.planes[0], self)
        self.parts = {
            rank: RankPart(engines[rank], self.planes[rank], takes_kv=False)
            for rank in range(1, size)
        }
        self.layout = self.pools[0].layout
        count = self.pools[0].num_blocks
        self.table = [*range(count)[::-1]]  # blocks of the state first
        self.state = self.table[: self.layout.num_state_blocks]
        self.rows = self.table[self.layout.num_state_blocks :]

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        return await self.parts[rank].answer(ask)

    def slots(self, blocks: list[int]) -> tuple[int, ...]:
        size = self.layout.slots_per_block
        return tuple(block * size + group for block in blocks for group in range(size))

    def regions(self, producer: Group) -> list[RemoteRegion]:
        region = self.kv.written(producer.layout)
        first = self.planes[0].descriptor(region, "")
        its_id = region.remote.region_id
        others = [
            next(there for name, via, there in part.joined().regions if (name, via) == (its_id, ""))
            for part in self.parts.values()
        ]
        return [first, *others]


SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize(("p", "c"), [*product(SIZES, SIZES)])
async def test_each_rank_has_its_own_heads_in_the_end(
    p: int, c: int, adapter: ModelAdapter
) -> None:
    """In two writes, of which the second has the state; sums are those of what was written."""
    memory, whole = LocalMemory(), drawn(adapter)
    there, here = Group("p", adapter, p, memory), Group("d", adapter, c, memory)
    rows = torch.randn_like(pool_of(adapter, rank_of(0, 1), NUM_BLOCKS).tensor[:NUM_BLOCKS])
    for rank, pool in enumerate(there.pools):
        write(pool, there.state, cut_from(whole, adapter, rank_of(rank, p)))
        heads = there.layout.shares[rank]
        pool.tensor[there.rows] = rows[:, :, :, :, heads.start : heads.stop]
    slots = here.slots([*here.rows, *here.state])
    last, size = len(here.rows) * here.layout.slots_per_block, here.layout.slots_per_block
    source = there.slots(there.rows)
    region, *parts = here.regions(there)
    grant = Grant(
        room="r", attempt=1, mm_hash="", region=region, slots=slots, contract=None, num_rows=1,
        deadline_s=9.0, gateway="gateway", parts=tuple(parts), layout=here.layout,
    )  # fmt: skip
    assert here.kv.objection(there.layout) == ""
    sent = [
        Sent(source[:size], slots[:size], (), ()),
        Sent(source[size:], slots[size:last], there.state, slots[last:]),
    ]
    sums = []
    for one in sent:
        outcomes = [await write() for write in there.kv.writes(one, grant)]
        assert all(isinstance(outcome, Written) for outcome in outcomes), outcomes
        sums.append(sum(outcome.checksum for outcome in outcomes) & 0xFFFFFFFF)  # type: ignore[union-attr]
    written = [(slots[:size], 0), (slots[size:], 0)]
    blocks = [*here.rows, *here.state]
    assert await here.kv.land(there.layout, "", slots, blocks, written) == sums
    for rank, pool in enumerate(here.pools):
        assert_equal(read(pool, here.state), cut_from(whole, adapter, rank_of(rank, c)))
        heads = here.layout.shares[rank]
        assert torch.equal(pool.tensor[here.rows], rows[:, :, :, :, heads.start : heads.stop])
    for plane in (*there.planes, *here.planes):
        await plane.close()


def test_states_that_do_not_fit_are_refused_by_name(adapter: ModelAdapter) -> None:
    there, here = (Group(name, adapter, size, LocalMemory()) for name, size in (("p", 4), ("d", 2)))
    here.kv._layout = replace(here.layout, most_state_blocks=1)
    wanted = "states from 4 ranks do not fit the blocks that 2 have for them; give prefill and"
    assert wanted in here.kv.objection(there.layout)
    assert here.kv.objection(here.layout) == ""


async def test_what_a_lost_rank_was_writing_may_still_land(adapter: ModelAdapter) -> None:
    there = Group("p", adapter, 2, LocalMemory())
    ask = mock.AsyncMock(side_effect=RankLost("rank 1 has ended"))
    grant: Any = mock.Mock(layout=there.layout, region="of rank 0", parts=("of rank 1",))
    with mock.patch.object(there, "ask", ask):
        _, second = there.kv.writes(Sent(there.slots(there.rows), (0, 1, 2), (), ()), grant)
        assert await second() == WriteUnknown("rank 1 has ended")


@pytest.mark.parametrize(
    ("own", "theirs", "holds"),
    [
        (True, Holds(holds=True), True),
        (False, Holds(holds=True), False),
        (True, Holds(holds=False), False),
        (True, RankLost("rank 2 has ended"), False),
    ],
)
async def test_what_a_group_says_of_memory_holds_at_all_its_ranks(
    own: bool, theirs: Holds | RankLost, holds: bool
) -> None:
    """All are asked, whatever the first ones say: a fence bars a peer where it is asked for."""
    plane: Any = mock.Mock(settle=mock.AsyncMock(return_value=own))
    plane.fence = mock.AsyncMock(return_value=own)
    others: Any = mock.Mock(joined={2: None, 1: None})
    peer = Address("d0", 7, "")
    group = GroupDataPlane(plane, others)
    told = {"has_ended": True}
    for method, more, by in (("settle", (), {}), ("fence", ("host", 5), told)):
        others.ask = mock.AsyncMock(side_effect=[Holds(holds=True), theirs])
        assert await getattr(group, method)(peer, *more, **by) is holds
        getattr(plane, method).assert_awaited_once_with(peer, *more, **by)
        ask = Fence(peer=peer, host_id="host", pid=5, **told) if more else Settle(peer=peer)
        assert [call.args for call in others.ask.await_args_list] == [(1, ask), (2, ask)]
