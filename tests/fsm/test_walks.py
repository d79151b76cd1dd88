"""Random walks: over any order of what may happen, each machine's books balance (see world.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import generation as g
from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import request as r
from epd.fsm import room
from epd.fsm.kernel import IllegalEvent, Row, Table, unless
from epd.fsm.request import TABLE as REQUEST
from tests.fsm.data_worlds import EmbeddingWorld, EncodingWorld, IncomingWorld, OutgoingWorld
from tests.fsm.mutants import patched
from tests.fsm.request_worlds import GenerationWorld, RequestWorld
from tests.fsm.world import World, walk

NUM_WALKS = 1500
Kind = TypeVar("Kind", bound=World)


def walked(make: Callable[[random.Random], Kind]) -> Iterator[Kind]:
    """Worlds after a walk each: every choice is as likely as the others, which a generator that
    prefers small numbers does not give; the seed of a walk that fails is told."""
    for seed in range(NUM_WALKS):
        dice = random.Random(seed)
        world = make(dice)
        try:
            walk(world, dice.randrange)
            yield world
        except (AssertionError, IllegalEvent) as error:
            error.add_note(f"seed {seed}")
            raise


def test_OUTGOING_balances() -> None:
    for world in walked(lambda _: OutgoingWorld()):
        ended = world.done[o.Do.RELEASE_SOURCE] + int(world.owned)
        world.need(ended == world.num_leases, "what is owned is given back exactly once")
        told = world.done[o.Do.CONCLUDE_FAILED] + world.done[o.Do.CONCLUDE_DELIVERED]
        world.need(told <= 1, "the owner is told twice")


def test_INCOMING_balances() -> None:
    for world in walked(lambda _: IncomingWorld()):
        published = world.done[i.Do.CONCLUDE_DELIVERED]
        ended = world.done[i.Do.RELEASE_SLOTS] + published + int(world.owned)
        world.need(ended == world.num_leases, "each lease ends exactly once")
        told = world.done[i.Do.CONCLUDE_FAILED] + published
        world.need(told <= 1, "the owner is told twice")


def a_request(dice: random.Random) -> RequestWorld:
    remote_kv = dice.random() < 0.5
    images = 0 if remote_kv else dice.randrange(3)
    return RequestWorld(images, remote_kv, dice.random() < 0.5)


def test_REQUEST_balances() -> None:
    for world in walked(a_request):
        firsts = [end for end in world.ended if end != "aborted"]
        world.need(len(firsts) <= 1, f"the gateway is told {firsts}")


def test_GENERATION_answers_once() -> None:
    for world in walked(lambda _: GenerationWorld()):
        world.need(world.answers() <= 1, "more than one answer")
        world.need(world.done[g.Do.CLOSE] <= 1, "the place is given back twice")


def test_ENCODING_balances() -> None:
    tiers = {
        e.S.RESIDENT: "device",
        e.S.DEMOTING: "host",  # bytes are counted where they are going
        e.S.DEMOTED: "host",
        e.S.PROMOTING: "device",
    }
    for world in walked(lambda dice: EncodingWorld(stored=dice.random() < 0.5)):
        kept = tiers.get(world.machine.state, "")
        world.need(world.kept == kept, f"rows are counted in {world.kept!r} and are in {kept!r}")
        world.need(all(n == 1 for n in world.filled.values()), "a room is filled once")
        if kept:
            filled = set(world.machine.rooms) <= set(world.filled)
            world.need(filled, "an open room is not filled")


def test_EMBEDDING_balances() -> None:
    for world in walked(lambda _: EmbeddingWorld()):
        world.need(all(n == 1 for n in world.told.values()), "a waiter is told twice")
        world.need(world.kept == (world.machine.state is m.S.RESIDENT), "slots without rows")


# --- the walks are worth something: with a bug put back, one of them stumbles ---------------------

MUTANTS: dict[str, tuple[Callable[[], World], Table, list[Any], list[Row]]] = {
    "F6: blocks are freed when the client leaves, step or not": (
        lambda: RequestWorld(0, False, True),
        REQUEST,
        [(r.S.DECODING, r.AbortReceived)],
        [
            Row(
                r.S.DECODING,
                r.AbortReceived,
                r.S.FINISHED,
                (r.Do.DEQUEUE, r.Do.RELEASE_BLOCKS, r.Do.SEND_ABORTED),
            )
        ],
    ),
    "an abort of a preempted request leaves its offer standing": (
        lambda: RequestWorld(0, False, False),
        REQUEST,
        [(r.S.PREEMPTED, r.AbortReceived)],
        [
            Row(
                r.S.PREEMPTED,
                r.AbortReceived,
                r.S.FINISHED,
                (r.Do.DEQUEUE, r.Do.RELEASE_EMBEDDINGS, r.Do.SEND_ABORTED),
            )
        ],
    ),
    "decode is lost while preempted, and the table does not know": (
        lambda: RequestWorld(0, False, False),
        REQUEST,
        [(r.S.PREEMPTED, r.KvFailed)],
        [],
    ),
    "F8: a producer's source is freed by a fence of the peer while its engine reads": (
        OutgoingWorld,
        o.TABLE,
        [(o.S.EXPIRE_PENDING, room.GraceEnded)],
        [Row(o.S.EXPIRE_PENDING, room.GraceEnded, o.S.QUARANTINED, (o.Do.SETTLE_WRITE,))],
    ),
    "F21: rows that nobody waits for are not kept in the books": (
        EncodingWorld,
        e.TABLE,
        [(e.S.ABANDONED, e.EncodeSucceeded)],
        [Row(e.S.ABANDONED, e.EncodeSucceeded, e.S.RESIDENT, (), e.keep_rows)],
    ),
    "F22: a new waiter of an abandoned load starts another one": (
        EmbeddingWorld,
        m.TABLE,
        [(m.S.ABANDONED, m.Wanted)],
        [Row(m.S.ABANDONED, m.Wanted, m.S.REQUESTED, (m.Do.OPEN_TRANSFER,), m.begin)],
    ),
    "F23: rows are evicted though somebody waits": (
        EmbeddingWorld,
        m.TABLE,
        [(m.S.RESIDENT, m.EvictionRequested)],
        [Row(m.S.RESIDENT, m.EvictionRequested, m.S.EVICTED, (m.Do.RELEASE_ROWS,))],
    ),
    "F40: a failed attempt ends as finished, without an answer": (
        GenerationWorld,
        g.TABLE,
        [(g.S.PLACED, g.AttemptFailed)],
        [
            Row(g.S.PLACED, g.AttemptFailed, g.S.MIGRATING, (g.Do.PLACE,), when=g.may_retry),
            Row(g.S.PLACED, g.AttemptFailed, g.S.FINISHED, (g.Do.CLOSE,), when=unless(g.may_retry)),
        ],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_walk_finds_a_bug_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, table, remove, rows = MUTANTS[name]
    kind = type(make().machine)
    monkeypatch.setattr(kind, "table", patched(table, remove, rows))
    for seed in range(30000):
        try:
            walk(make(), random.Random(seed).randrange)
        except (AssertionError, IllegalEvent):
            return
    pytest.fail("30000 walks did not notice")
