"""Any value in any field of any message: the codec refuses it, or roles outlive it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from epd.messages import MESSAGES, PROTOCOL_VERSION, Heartbeat, Leave, Message, PrefillRequest
from epd.transport.codec import FrameLimits, FrameRejected, unpack
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.planes.network import Parcel
from tests.hostile import messages as hostile
from tests.roles.simulated import Simulated, simulated

LIMITS = FrameLimits()
each_type = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
MEANT = (Heartbeat, Leave)  # from a member they are what they say


def check_codec(kind: type[Message], count: int) -> int:
    """How many of so many came in."""
    taken = 0
    for seed in range(count):
        header, *payloads = hostile.frames(kind, seed, mild=seed % 4 == 0)
        try:
            received = unpack(header, tuple(payloads), 1, LIMITS)
        except FrameRejected as rejected:
            assert rejected.source in ("stranger", "") and rejected.kind.startswith("malformed")
            continue
        taken += 1
        for value in hostile.walk(received.message):
            if isinstance(value, float):
                assert value == -math.inf or math.isfinite(value)
    return taken


@each_type
def test_the_codec_raises_nothing_but_a_rejection(kind: type[Message]) -> None:
    assert check_codec(kind, 200)


UNBOUNDED = {"TokenChunk"}  # see its docstring


def check_bounded(kind: inspect.Type, where: str) -> None:
    match kind:
        case inspect.IntType(ge=low, le=high):
            assert low is not None and high is not None, where
        case inspect.FloatType(le=high):
            assert high is not None, where  # which also keeps out what is no number
        case inspect.VarTupleType(item_type=item):
            check_bounded(item, where)
        case inspect.TupleType(item_types=kinds) | inspect.UnionType(types=kinds):
            for each in kinds:
                check_bounded(each, where)
        case inspect.StructType(cls=cls, fields=fields) if cls.__name__ not in UNBOUNDED:
            for field in fields:
                if field.name != "prompt":  # log-probabilities have some of their own
                    check_bounded(field.type, f"{cls.__name__}.{field.name}")


@each_type
def test_every_number_has_bounds(kind: type[Message]) -> None:
    check_bounded(hostile.TYPES[kind.__name__], kind.__name__)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**63 - 1, 2**64 - 1])
def test_no_token_overflows_who_reads_it(token_id: int) -> None:
    """It stopped the step loop for all: OverflowError, again and again."""
    said = hostile.message(PrefillRequest, 1, mild=True)
    for good in (0, token_id):
        said[3] = [good]
        said[4], said[5] = 0, []
        header = msgspec.msgpack.encode([PROTOCOL_VERSION, "gateway", 1, said])
        if good == 0:
            assert unpack(header, (), 1, LIMITS).message.token_ids == (0,)
            continue
        with pytest.raises(FrameRejected, match="malformed PrefillRequest"):
            unpack(header, (), 1, LIMITS)


@pytest.mark.long
@each_type
def test_the_codec_outlives_a_hundred_thousand(kind: type[Message]) -> None:
    check_codec(kind, 100_000)


def say_all(at: Simulated, source: str, epoch: int, count: int) -> None:
    for name in (GATEWAY, "e0", "p0", "d0"):
        bus = at.world.network.buses[name]
        for kind in MESSAGES:
            if name == source or (source != "stranger" and kind in MEANT):
                continue
            for seed in range(count):
                header, *payloads = hostile.frames(
                    kind, seed, source=source, epoch=epoch, mild=seed % 4 != 0
                )
                bus.process.context.run(bus.receive, Parcel(header, tuple(payloads), "", 1))
        at.pass_time(0.05)


def serves(at: Simulated) -> None:
    record = at.ask(Image("one"), max_tokens=4)
    at.pass_time(20.0)
    assert len(record.tokens) == 4 and not record.error, record


def check_roles(source: str, count: int) -> None:
    with simulated("1e1p1d") as at:
        epoch = 1 if source == "stranger" else at.node(source).process.epoch
        say_all(at, source, epoch, count)
        serves(at)
        assert not at.world.loop.escaped
        for name in (GATEWAY, "e0", "p0", "d0"):
            node = at.node(name)
            owner: Any = node.gateway or node.instance
            counters = owner.actor.counters
            assert not counters["faults"] and not counters["illegal_events"], (name, counters)
            if source == "stranger":
                assert counters["message_of_stranger"]
                assert not any(owner.live().values()), (name, owner.live())


@pytest.mark.parametrize("source", ["stranger", "d0", "p0", "e0"])
def test_roles_outlive_what_is_said(source: str) -> None:
    check_roles(source, 6)


@pytest.mark.long
@pytest.mark.parametrize("source", ["stranger", "d0", "p0", "e0"])
def test_roles_outlive_much_that_is_said(source: str) -> None:
    check_roles(source, 300)
