"""Small parts of roles: what each promises to the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.config import Timing
from epd.engine.base import EngineError
from epd.fsm.outgoing import PeerFenced, WriteRefused, WriteSettled
from epd.fsm.room import RetryDue
from epd.groups.asks import LandKv
from epd.groups.data import RankKv, RankPart
from epd.messages import Address, CacheEvents, CacheEventsWanted, EncodeAccepted, ProfileReport
from epd.records import Load
from epd.roles.decode.landing import Landing
from epd.roles.encode.askers import Asker, Askers
from epd.roles.encode.finder import NoTower
from epd.roles.incoming import IncomingRooms
from epd.roles.outgoing import OutgoingRooms
from epd.roles.watching.profiling import ANSWER_TIMEOUT_S, Profiles
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine import golden
from tests.roles.desk import desk

PEER = Address("e0", 1, "")


# --- an engine without a tower --------------------------------------------------------------------


@pytest.mark.parametrize("call", ["preprocess", "encode", "copy_out"])
async def test_what_an_instance_without_a_tower_cannot_do_is_said(call: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "preprocess": (b"", (1, 2, 2)),
        "encode": ([],),
        "copy_out": (None, []),
    }
    with pytest.raises(EngineError):
        await getattr(NoTower(golden.ROW_CONTRACT), call)(*arguments[call])


async def test_rows_in_host_memory_are_where_they_are() -> None:
    tower, rows = NoTower(golden.ROW_CONTRACT), mock.Mock()
    assert await tower.to_host(rows) is rows and await tower.to_device(rows) is rows


# --- doubts ---------------------------------------------------------------------------------------


class Plane:
    """A data plane that answers so, or raises."""

    def __init__(self, answer: Any) -> None:
        self.settle = mock.AsyncMock(side_effect=[answer])
        self.fence = mock.AsyncMock(side_effect=[answer])


def doubts(answer: Any, *, listed: bool = False, lost: bool = False, known: bool = True) -> Any:
    plane = Plane(answer)
    actor = mock.MagicMock(ports=SimpleNamespace(transfers=plane))
    actor.is_listed.return_value, actor.is_lost.return_value = listed, lost
    actor.peer_info.return_value = (
        SimpleNamespace(host_id="h", pid=7, other_ranks=()) if known else None
    )
    return OutgoingRooms(actor, Timing(retry_interval_s=3.0)), plane, actor.timers.arm, actor


def room(*, terminal: bool = False) -> Any:
    return SimpleNamespace(peer=PEER, key="r", terminal=terminal, grant=None)


@pytest.mark.parametrize("answer", [True, False, OSError("x")])
async def test_a_write_is_settled_or_asked_after_again(answer: Any) -> None:
    made, plane, later, actor = doubts(answer)
    transfer = room()
    outcome = await made.settle_write(transfer, None)
    plane.settle.assert_awaited_once_with(PEER)
    assert not plane.fence.called
    assert outcome == (WriteSettled() if answer is True else None)
    again = mock.call(transfer, RetryDue, 3.0, mock.ANY)
    assert later.call_args_list == ([] if answer is True else [again])
    assert actor.fault.called == isinstance(answer, OSError)


async def test_who_is_lost_and_not_listed_is_fenced_and_settles_nothing() -> None:
    made, plane, later, _ = doubts(True, lost=True)
    assert await made.settle_write(room(), None) == PeerFenced()
    plane.fence.assert_awaited_once_with(PEER, "h", 7)
    assert not later.called and not plane.settle.called


async def test_to_whom_no_registry_has_told_of_nothing_is_written() -> None:
    """F7: where it runs is not known, so a doubt about it could never end; there is none."""
    made, plane, later, actor = doubts(True, known=False)
    plane.write = mock.AsyncMock()
    transfer = room()
    transfer.grant = SimpleNamespace(parts=("of rank 1",))
    outcome = await made.start_write(transfer, None)
    assert isinstance(outcome, WriteRefused) and "no registry" in outcome.reason
    assert await made.settle_write(transfer, None) == WriteSettled()
    actor.is_lost.return_value = True
    assert await made.settle_write(transfer, None) == PeerFenced()
    assert not (plane.write.called or plane.fence.called or plane.settle.called or later.called)


async def test_of_a_group_every_rank_is_fenced() -> None:
    """F30: by the host and pid of each: of two hosts, the same pid is another process."""
    made, plane, later, actor = doubts(True, lost=True)
    others = ("h", 8), ("another", 8)
    actor.peer_info.return_value.other_ranks = others
    plane.fence.side_effect = [True, True, False]
    assert await made.settle_write(room(), None) is None and later.called
    asked = [(one.args[0].instance_id, *one.args[1:]) for one in plane.fence.await_args_list]
    name = PEER.instance_id
    assert asked == [(name, "h", 7), (f"{name}.1", "h", 8), (f"{name}.2", "another", 8)]


@pytest.mark.parametrize(
    ("epoch", "place", "has_ended"),
    [(9, ("h", 7), True), (9, ("h", 8), False), (9, ("another", 7), False), (1, ("h", 7), False)],
)
async def test_a_later_life_of_its_process_attests_that_it_has_ended(
    epoch: int, place: tuple[str, int], *, has_ended: bool
) -> None:
    """F7: of the same pid alone, since the former one of another is ended by nobody's word."""
    made, plane, _, actor = doubts(True, lost=True)
    later = SimpleNamespace(host_id=place[0], pid=place[1])
    actor.peers = {
        (PEER.instance_id, epoch): later,
        ("another", 9): SimpleNamespace(host_id="h", pid=7),
    }
    assert await made.settle_write(room(), None) == PeerFenced()
    told = {"has_ended": True} if has_ended else {}
    plane.fence.assert_awaited_once_with(PEER, "h", 7, **told)


async def test_who_is_listed_is_never_fenced() -> None:
    made, plane, later, _ = doubts(True, listed=True, lost=True)
    transfer = room()
    assert await made.settle_write(transfer, None) is None
    assert not plane.fence.called
    later.assert_called_once_with(transfer, RetryDue, 3.0, mock.ANY)


@pytest.mark.parametrize("answer", [True, False])
async def test_a_room_that_has_ended_meanwhile_asks_no_more(*, answer: bool) -> None:
    made, _, later, _ = doubts(answer, lost=True)
    assert await made.settle_write(room(terminal=True), None) is None
    assert not later.called


# --- who asked for a room -------------------------------------------------------------------------


def asker(keeps: bool = False, reports: bool = False, epoch: int = 1) -> Asker:
    return Asker("q", 2, Address(GATEWAY, epoch, ""), "hash", reports, keeps)


def test_open_rooms_are_told_of_now_and_then() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        askers = Askers(at.actor, Timing(stall_timeout_s=0.9))
        at.do(askers.add, "a", asker())
        at.cluster.pass_time(0.2)
        at.do(askers.add, "b", asker())
        at.cluster.pass_time(0.11)
        both = [(GATEWAY, EncodeAccepted(room=room, attempt=2)) for room in "ab"]
        assert at.said == both
        at.cluster.pass_time(0.3)
        assert at.said == both * 2
        for name in "ab":
            at.do(askers.closed, name)
        at.cluster.pass_time(0.3)
        assert len(at.said) == 4 and not len(askers)
        assert "Askers._tell" not in [*at.actor.timers]


def test_who_wants_a_timeline_is_told_how_a_room_went() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        askers = Askers(at.actor, Timing())
        subject = mock.Mock(story=())
        for name, reports, machines, told in (
            ("a", True, (subject, None), 1),
            ("b", False, (subject, None), 0),
            ("c", True, (None, None), 0),
        ):
            at.do(askers.add, name, asker(reports=reports))
            at.said.clear()
            at.do(askers.closed, name, *machines)
            assert len(at.said) == told, name
        at.do(askers.closed, "never heard of", subject)
        assert not at.said


def test_who_asked_is_found_by_room_and_by_life() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        askers = Askers(at.actor, Timing())
        made = {"a": asker(keeps=True), "b": asker(), "c": asker(keeps=True, epoch=2)}
        for name, one in made.items():
            at.do(askers.add, name, one)
        found = [askers.keeper(name) for name in "abcd"]
        assert found == [made["a"], None, made["c"], None]
        assert list(askers.of(Address(GATEWAY, 1, ""))) == [("a", made["a"]), ("b", made["b"])]
        assert list(askers.of(Address("x", 1, ""))) == []


# --- what encoders hold ---------------------------------------------------------------------------


def test_what_an_encoder_says_of_its_cache_counts_while_it_is_a_member() -> None:
    with desk("1e1p1d", GATEWAY, "directory") as at:
        index = at.role.index
        events = CacheEvents(sequence=1, full=True, stored=("h",), evicted=())
        for source, epoch in (("e0", 2), ("x", 1)):
            assert at.tell("on_events", events, source, epoch=epoch) == []
        assert index.resident("h") == ()
        assert at.tell("on_events", events, "e0") == [] and index.resident("h") == ("e0",)
        gap = CacheEvents(sequence=3, full=False, stored=("i",), evicted=())
        assert at.tell("on_events", gap, "e0") == [CacheEventsWanted()]
        assert at.said[0][0] == "e0" and at.actor.counters["cache_events_missed"] == 1
        registry = at.cluster.gateway.registry
        (encoder,) = (i for i in registry.instances if i.key == "e0:1")
        for sequence, asked in ((1, 0), (2, 1)):
            encoder.load = Load(cache_sequence=sequence)
            at.said.clear()
            for heard in registry.heartbeat_listeners:
                at.do(heard, encoder)
            assert at.said == [("e0", CacheEventsWanted())] * asked
        at.do(at.role.peer_lost, Address("e0", 1, ""))
        assert index.resident("h") == ()


# --- profiles -------------------------------------------------------------------------------------


async def test_a_report_that_nobody_waits_for_is_not_heard() -> None:
    actor = mock.MagicMock()
    members = [
        SimpleNamespace(present=name != "c", info=SimpleNamespace(address=Address(name, 1, "")))
        for name in "abc"
    ]
    profiles = Profiles(actor, SimpleNamespace(instances=members))  # type: ignore[arg-type]

    def report(serial: int, source: str, detail: str) -> None:
        message = ProfileReport(serial=serial, ok=True, detail=detail)
        profiles.on_report(SimpleNamespace(source=source, message=message))  # type: ignore[arg-type]

    report(1, "a", "early")
    asking = asyncio.ensure_future(profiles.ask(starts=True))
    await asyncio.sleep(0)
    assert [call.args[0].instance_id for call in actor.send.call_args_list] == ["a", "b"]
    report(1, "c", "not asked")
    report(1, "a", "one")
    report(1, "a", "again")
    await asyncio.sleep(0)
    assert not asking.done()
    report(1, "b", "two")
    assert await asking == {"a": (True, "one"), "b": (True, "two")}
    report(1, "b", "late")
    ((ring,),) = [call.args for call in actor.timers.cancel_call.call_args_list]
    actor.timers.call_later.assert_called_once_with(ANSWER_TIMEOUT_S, ring)


# --- landing --------------------------------------------------------------------------------------


def landing(size: int = 4) -> Landing:
    engine: Any = SimpleNamespace(
        num_landing_blocks=size, kv_layout=SimpleNamespace(slots_per_block=2)
    )
    return Landing(engine)


def test_what_needs_no_memory_in_front_of_the_pool_gives_none_back() -> None:
    made = landing()
    assert made.slots((8, 9)) == (16, 17, 18, 19)
    made.release("r")
    assert made.num_leased == 0
    assert made.fits(4) and not made.fits(5)


def test_who_does_not_fit_the_landing_memory_waits_in_its_queue() -> None:
    made = landing()
    for name, blocks in (("a", (10, 11, 12)), ("b", (13, 14)), ("c", (15,))):
        made.join(name, blocks)
    ((room, slots),) = made.grants()
    assert (room, slots) == ("a", (0, 1, 2, 3, 4, 5)), "nobody is overtaken"
    assert made.num_leased == 5
    made.release("a")
    assert list(made.grants()) == [("b", (6, 7, 0, 1)), ("c", (2, 3))]
    made.join("d", (16, 17))
    made.join("e", (18,))
    assert list(made.grants()) == []
    made.leave("d")
    assert list(made.grants()) == [("e", (4, 5))]
    made.leave("d")
    for room in "bcdea":
        made.release(room)
    assert made.num_leased == 0


def landing_engine(**its: Any) -> Any:
    layout = SimpleNamespace(num_kv_heads=2, slots_per_block=2, slot_nbytes=8)
    return mock.MagicMock(kv_layout=layout, num_landing_blocks=4, **its)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("heads", [(), ((0, 1),)])
async def test_what_has_landed_is_copied_or_put_in_order_where_it_has_to_be(
    *, in_place: bool, heads: tuple[tuple[int, int], ...]
) -> None:
    engine, transfers = landing_engine(kv_in_place=in_place), mock.MagicMock()
    engine.land_kv = mock.AsyncMock()
    kv = RankKv(engine, transfers)
    assert kv.is_pool("shm") is in_place
    ask = LandKv(transport="shm", slots=(4, 5, 0, 1), blocks=(10, 11), heads=heads)
    assert (await kv.land(ask)).sums == ()
    memory = transfers.landing.return_value.buffer
    if in_place and not heads:
        engine.land_kv.assert_not_awaited()
    else:
        engine.land_kv.assert_awaited_once_with(memory, [2, 0], (10, 11), by_head=bool(heads))
    transfers.recut.assert_called_once_with(kv.region, 2) if heads else (
        transfers.recut.assert_not_called()
    )


@pytest.mark.parametrize("takes_kv", [True, False])
@pytest.mark.parametrize("has_memory", [True, False])
def test_a_rank_that_kv_comes_to_lets_others_write_its_pool(
    *, takes_kv: bool, has_memory: bool
) -> None:
    memory = {} if has_memory else {"kv_memory": None}
    engine, transfers = landing_engine(kv_in_place=False, **memory), mock.MagicMock()
    RankPart(engine, transfers, takes_kv=takes_kv)
    region = transfers.allocate.return_value
    engine.attach_kv.assert_called_once_with(region.buffer)
    mirrored = [mock.call(region, engine.kv_memory)] * (takes_kv and has_memory)
    assert transfers.mirror.call_args_list == mirrored


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("reaches", [True, False])
def test_kv_lands_in_the_pool_of_a_device_where_the_transport_reaches_it(
    *, reaches: bool, has_memory: bool
) -> None:
    memory = {} if has_memory else {"kv_memory": None}
    engine, transfers = landing_engine(kv_in_place=False, **memory), mock.MagicMock()
    transfers.mirror.return_value.remote.backend = "cuda"
    if not reaches:
        transfers.mirror.return_value = None
    kv = RankKv(engine, transfers)
    assert not kv.is_pool("cuda")
    kv.take_in()
    assert kv.is_pool("cuda") is (reaches and has_memory)
    assert not kv.is_pool("shm") and not kv.is_pool("")


@pytest.mark.parametrize("transport", ["", "shm"])
def test_memory_of_a_room_is_that_of_its_pair_of_instances(transport: str) -> None:
    transfers, region = mock.Mock(), mock.Mock()
    rooms: Any = SimpleNamespace(actor=SimpleNamespace(ports=SimpleNamespace(transfers=transfers)))
    incoming: Any = SimpleNamespace(key="r/1/0")
    rooms.transport_of = mock.Mock(return_value=transport)
    IncomingRooms.parts(rooms, region, incoming)
    IncomingRooms.landing(rooms, region, incoming)
    transfers.parts.assert_called_once_with(region, transport)
    transfers.landing.assert_called_once_with(region, transport)
