"""Placing attempts: the books, prefixes, what is waited for, and what a client is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.failure import Failure, FailureKind
from epd.frontend import Leave
from epd.fsm.generation import PlacementTimedOut, S
from epd.messages import AbortEncode, Address
from epd.roles.gateway.affinity import SHORT_BLOCKS, _num_tokens, _tokens
from epd.roles.member import absent_after_s
from epd.scheduling.placement import Unplaceable
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import BLOCK_SIZE, Image
from tests.roles.desk import Open, desk, gateway
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
ONE, TWO = Image("one"), Image("two")


def test_the_books_are_of_what_is_open() -> None:
    with gateway() as at:
        dispatcher = at.whole.dispatcher
        books, one = dispatcher.books, Open(at, "", ONE)
        names = {one.encoder(0), one.prefill, one.decode}
        assert {n: books.assigned_to(n) for n in ("e0", "e1", "p0", "p1", "d0", "d1")} == {
            n: int(n in names) for n in ("e0", "e1", "p0", "p1", "d0", "d1")
        }
        assert books.num_assigned == 3
        hashes = [item.mm_hash for item in one.prepared.items]
        assert books.in_flight(hashes[0]) == (one.encoder(0),)
        found = {c.instance_id: c.assigned for c in dispatcher.candidates()}
        assert len(found) == 6 and sum(found.values()) == 3
        old = one.encoder(0)
        one.fails(one.prefill, "engine", culprit=old)
        assert books.num_assigned == 3 and books.assigned_to(old) == 0
        assert books.in_flight(hashes[0]) == (one.encoder(0),)
        one.tokens(0, 21, finish_reason="stop")
        assert books.num_assigned == 0 and books.in_flight(hashes[0]) == ()
        assert not len(books) and not dispatcher.offers.live()["offers"]


def test_who_is_given_up_is_called_off_at_its_encoders_and_who_was_served_is_not() -> None:
    with gateway() as at:
        one, other = Open(at, "", ONE, TWO), Open(at, "", ONE)
        rooms = [one.room(0), one.room(1)]
        encoders = [one.encoder(0), one.encoder(1)]
        at.said.clear()
        at.cluster.within(GATEWAY, one.stream.cancel, Leave.GONE, "the client left")
        told = [(to, AbortEncode(room=room)) for to, room in zip(encoders, rooms, strict=True)]
        assert one.sent(AbortEncode) == told
        at.said.clear()
        other.tokens(0, 21, finish_reason="stop")
        assert not other.sent(AbortEncode)
        at.cluster.pass_time(TIMING.accept_timeout_s)
        assert not [name for name in at.actor.timers if name.startswith("OFFER")]


def test_a_request_without_a_topology_waits_for_so_long() -> None:
    with gateway() as at:
        lacking = Unplaceable("no prefill")
        with mock.patch.object(at.whole.dispatcher, "choose", return_value=lacking):
            one = Open(at)
            for waited_s, is_over in ((TIMING.topology_timeout_s - 0.1, False), (0.2, True)):
                at.cluster.pass_time(waited_s)
                assert one.machine.terminal == is_over
        assert one.machine.failure == Failure(FailureKind.UNAVAILABLE, "no prefill")
        with mock.patch.object(at.whole.dispatcher, "choose", return_value=lacking):
            other = Open(at)
        at.cluster.pass_time(TIMING.retry_interval_s + 0.1)
        assert other.machine.state is S.PLACED
        assert not at.actor.timers.runs(other.machine, PlacementTimedOut)


@pytest.mark.parametrize("known", [True, False])
def test_rows_that_storage_does_not_have_need_an_encoder_that_there_was(*, known: bool) -> None:
    with desk("1e1p1d" if known else "1p1d", GATEWAY, "role") as at:
        at.cluster.pass_time(absent_after_s(TIMING) + 0.1)  # all of a registry before have joined
        books, one = at.whole.dispatcher, Open(at, "", ONE)
        if known:
            left = SimpleNamespace(source="e0", epoch=1, message=None)
            at.do(at.whole.registry.on_leave, left)
        machine: Any = one.machine
        assert books.may_come(machine), "of any other thing"
        assert isinstance(books.choose(machine), Unplaceable)
        machine.failures[FailureKind.ABSENT] = 1
        assert books.may_come(machine) == known
        chosen = books.choose(machine)
        assert chosen.reason.startswith("the rows of an image are not in the shared storage, and")


def test_what_is_lacking_is_told() -> None:
    for topology, told in (("1e1p1d", ""), ("1p1d", "encode")):
        with desk(topology, GATEWAY, "role") as at:
            lacking = at.whole.dispatcher.lacking
            assert told in lacking(with_images=True) and lacking(with_images=False) == ""
            assert bool(told) == bool(lacking(with_images=True))


def test_who_answers_nothing_is_avoided() -> None:
    with gateway() as at:
        at.fall_silent("p0", "d1")
        one = Open(at)
        assert (one.prefill, one.decode) == ("p1", "d0")


def test_an_image_finds_another_encoder() -> None:
    with gateway() as at:
        books, one = at.whole.dispatcher, Open(at, "", ONE)
        first = one.encoder(0)
        other = books.another_encoder(one.machine, 0, {first})
        assert other is not None and {first, other.instance_id} == {"e0", "e1"}
        assert books.another_encoder(one.machine, 0, {"e0", "e1"}) is None
        at.fall_silent(other.instance_id)
        assert books.another_encoder(one.machine, 0, {first}) is None


# --- prefixes -------------------------------------------------------------------------------------


def test_a_text_is_the_prompt_and_what_was_said() -> None:
    prompt, said = list(range(10, 16)), list(range(20, 25))
    machine: Any = SimpleNamespace(prompt=SimpleNamespace(token_ids=tuple(prompt)), token_ids=said)
    assert _num_tokens(machine) == 11
    for start in range(12):
        for stop in range(start, 12):
            assert list(_tokens(machine, start, stop)) == (prompt + said)[start:stop]


def text(at: Any, *, length: int = 8 * BLOCK_SIZE) -> Open:
    return Open(at, text=tuple(range(100, 100 + length)))


def test_a_conversation_goes_back_to_where_it_was() -> None:
    with gateway() as at:
        affinity = at.whole.affinity
        one = text(at)
        prefill, decode = one.prefill, one.decode
        held = affinity.shares(one.machine, at.whole.dispatcher.candidates())
        assert held == dict.fromkeys((prefill, decode), 8 / SHORT_BLOCKS)
        answer = range(200, 200 + BLOCK_SIZE)
        one.tokens(0, *answer, finish_reason="stop")
        assert affinity.live() == {"prefix_keys": 0}
        tracked = {n: affinity.record.num_tracked(n) for n in ("p0", "p1", "d0", "d1")}
        assert tracked == {
            n: 9 if n == decode else 8 if n == prefill else 0 for n in ("p0", "p1", "d0", "d1")
        }
        again = text(at)
        assert (again.prefill, again.decode) == (prefill, decode)
        long = text(at, length=2 * SHORT_BLOCKS * BLOCK_SIZE)
        held = affinity.shares(long.machine, at.whole.dispatcher.candidates())
        assert held[long.prefill] == 1.0
        at.do(affinity.peer_lost, Address(decode, 1, ""))
        again.tokens(0, *answer, finish_reason="stop")
        assert affinity.record.num_tracked(decode) == 0, "of the lost nothing is noted"


def test_what_is_held_is_no_work_that_waits() -> None:
    length = SHORT_BLOCKS * BLOCK_SIZE
    with gateway() as at:
        work = at.whole.dispatcher.books
        one = text(at, length=length)
        assert work.at(one.prefill).num_tokens == length
        one.tokens(0, 21, finish_reason="stop")
        again = text(at, length=length)
        assert again.prefill == one.prefill and work.at(again.prefill).num_tokens == 0


def test_with_one_instance_of_each_kind_nothing_is_computed() -> None:
    with desk("1p1d", GATEWAY, "role") as at:
        one, affinity = text(at), at.whole.affinity
        assert affinity.live() == {"prefix_keys": 0} and not affinity.record.num_tracked(
            one.prefill
        )


def test_a_prompt_that_fills_no_block_is_nowhere() -> None:
    with gateway() as at:
        one = text(at, length=1)
        affinity = at.whole.affinity
        assert affinity.shares(one.machine, at.whole.dispatcher.candidates()) == {}
        one.fails(one.prefill, "contract")
        assert affinity.live() == {"prefix_keys": 0}
