"""Adapters that come to a group while it serves: in two phases, and by all ranks or none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence

from epd.engine.adapter_list import FollowedList
from epd.engine.base import AdapterParts, EngineError
from epd.fsm.group import RankEnded
from epd.groups.asks import Answer, AnyAsk, Holds, Joined, RankLost, ReadAdapter
from epd.groups.engines import GroupLanguageEngine
from epd.groups.leader import ChangeAdapters, Step
from epd_lab.bench.gateway.null_engine import NullLanguage
from tests.groups.test_group import BATCH, Played, settled


class Others:
    """The port `OtherRanks`: what is asked waits for the test's answer."""

    places = ()

    def __init__(self, size: int) -> None:
        self.joined = {rank: Joined(regions=()) for rank in range(1, size)}
        self.asked: dict[int, tuple[AnyAsk, asyncio.Future[Answer]]] = {}

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        self.asked[rank] = ask, asyncio.get_running_loop().create_future()
        return await self.asked[rank][1]


class PlayedShare(NullLanguage):
    """The leader's own part of adapters, which it reads and changes at once."""

    def __init__(self) -> None:
        self.changes: list[tuple[Sequence[str], str]] = []
        self._followed = FollowedList(lambda: tuple(held for _, held in self.changes if held))

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._followed.usable

    def hold_adapters(
        self, wanted: Mapping[str, str], parts: AdapterParts | None = None
    ) -> Coroutine[object, None, dict[str, str]]:
        return self._followed.follow(wanted, parts or self)

    async def read_adapter(self, digest: str, path: str) -> None: ...

    async def change_adapters(self, dropped: Sequence[str], held: str) -> None:
        self.changes.append((dropped, held))


def joined() -> tuple[Played, Others]:
    """Three ranks."""
    group, others = Played().joined(), Others(3)
    group.engine = GroupLanguageEngine(PlayedShare(), group.run, group.leader, others)
    return group, others


async def test_an_adapter_comes_in_a_command_when_all_ranks_have_it_ready() -> None:
    """A step behind that is a later command at each rank."""
    group, others = joined()
    loading = asyncio.ensure_future(group.engine.hold_adapters({"d": "path"}))
    await settled()
    assert [ask for ask, _ in others.asked.values()] == [ReadAdapter(digest="d", path="path")] * 2
    others.asked[2][1].set_result(Holds(holds=True))
    await settled()
    assert not group.sent and group.engine.adapters == ()
    others.asked[1][1].set_result(Holds(holds=True))
    await settled()
    group.step()
    assert group.sent == [(1, ChangeAdapters((), "d")), (2, Step(BATCH))]
    group.answer(1, 2)
    await settled()
    assert not loading.done()
    group.answer(1, 1)
    assert await loading == {} and group.engine.adapters == ("d",)


async def test_a_rank_that_cannot_read_an_adapter_keeps_it_from_all() -> None:
    """The others forget what they have ready, in a command."""
    group, others = joined()
    loading = asyncio.ensure_future(group.engine.hold_adapters({"d": "path"}))
    await settled()
    others.asked[1][1].set_exception(EngineError("rank 1: no file"))
    await settled()
    assert not group.sent, "one is still reading"
    others.asked[2][1].set_result(Holds(holds=True))
    await settled()
    assert group.sent == [(1, ChangeAdapters((), ""))]
    group.answer(1, 1, 2)
    assert await loading == {"d": "rank 1: no file"} and group.engine.adapters == ()


async def test_a_group_that_is_lost_while_an_adapter_is_read_holds_it_nowhere() -> None:
    group, others = joined()
    loading = asyncio.ensure_future(group.engine.hold_adapters({"d": "path"}))
    await settled()
    group.leader.fire(RankEnded(1, "killed"))
    others.asked[1][1].set_exception(RankLost("rank 1 has ended"))
    others.asked[2][1].set_result(Holds(holds=True))
    assert await loading == {"d": "rank 1 has ended"} and group.engine.adapters == ()
