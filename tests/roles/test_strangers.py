"""Who may say what to whom, and what one request that cannot be planned or told of costs others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.failure import FailureKind
from epd.fsm.request import Request
from epd.groups.asks import RankLost
from epd.messages import (
    OF_GATEWAY,
    PROTOCOL_VERSION,
    Address,
    CancelTransfer,
    Grant,
    Heartbeat,
    Join,
    LinkEcho,
    LinkProbe,
    Load,
    Message,
    RequestInquiry,
)
from epd.roles.gateway.registry import MAX_OUTSIDE
from epd.roles.steps.step import sequence_of
from epd.transport.base import Received, Unsendable
from epd_lab.sim.client import Record
from epd_lab.sim.cluster import FINGERPRINT, GATEWAY
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.engines import SimVisionEngine
from epd_lab.sim.engine.golden import Image
from tests.roles.simulated import Simulated, simulated

CANCEL = CancelTransfer(room="r/1/0", attempt=1)


def hear(at: Simulated, name: str, source: str, message: Message, epoch: int = 1) -> int:
    """What it is told; how many messages of strangers it has counted then."""
    node = at.node(name)
    owner = node.gateway or node.instance
    assert owner is not None
    at.within(name, owner.actor.deliver, Received(source, epoch, message))
    at.pass_time(0.01)
    return owner.actor.counters["message_of_stranger"]


def test_an_instance_hears_its_gateway_and_lives_that_a_registry_told_of() -> None:
    with simulated("1e1p1d") as at:
        assert hear(at, "p0", "e0", CANCEL) == 0
        assert hear(at, "p0", "e0", CANCEL, epoch=2) == 1
        assert hear(at, "p0", "stranger", CANCEL) == 2
        inquiry = RequestInquiry(request_id="r", attempt=1)
        assert hear(at, "p0", GATEWAY, inquiry) == 2
        assert type(inquiry) in OF_GATEWAY
        assert hear(at, "p0", "e0", inquiry) == 3, "a member is no gateway"
        assert hear(at, "p0", "p0", CANCEL) == 3, "itself"


def test_a_gateway_hears_of_strangers_that_they_would_join() -> None:
    with simulated("1e1p1d") as at:
        warnings = at.node(GATEWAY).warnings
        assert hear(at, GATEWAY, "e0", Heartbeat(load=Load())) == 0
        assert hear(at, GATEWAY, "stranger", LinkProbe(is_mute=True)) == 1
        assert warnings == [], "it asks for its welcome"
        assert hear(at, GATEWAY, "e0", Heartbeat(load=Load()), epoch=2) == 2
        assert len(warnings) == 1
        info = at.gateway.registry.instances[0].info
        info = msgspec.structs.replace(info, address=Address("stranger", 1, "sim://stranger"))
        join = Join(protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=info)
        assert hear(at, GATEWAY, "stranger", join) == 2
        assert hear(at, GATEWAY, "stranger", Heartbeat(load=Load())) == 2


def test_what_another_models_instance_says_of_others_does_not_count() -> None:
    with simulated("1e1p1d") as at:
        registry = at.gateway.registry
        info = registry.instances[0].info
        members = {i.key: i.state for i in registry.instances}
        lives = tuple((i.info.address.instance_id, 1) for i in registry.instances)
        for index in range(MAX_OUTSIDE + 9):
            name = f"s{index}"
            own = msgspec.structs.replace(info, address=Address(name, 1, f"sim://{name}"))
            join = Join(
                protocol_version=PROTOCOL_VERSION, model_fingerprint="other", info=own, lost=lives
            )
            hear(at, GATEWAY, name, join)
        assert {i.key: i.state for i in registry.instances} == members
        lines = [at.gateway.actor.send(f"s{n}", LinkEcho()) for n in range(MAX_OUTSIDE + 9)]
        assert sum(lines) == MAX_OUTSIDE, "no connection is kept for each who asks"


def test_request_ids_cannot_be_foreseen() -> None:
    with simulated("1e1p1d") as at:
        records = [at.ask(max_tokens=2) for _ in range(3)]
        at.pass_time(5.0)
        drawn = {int(one.request_id.removeprefix(f"{GATEWAY}-"), 16) for one in records}
        assert len(drawn) == 3 and max(drawn) - min(drawn) > 1 << 40


# --- one request of a step ------------------------------------------------------------------------


class Broken(Exception):
    pass


@contextmanager
def breaking(name: str, seed: int) -> Iterator[None]:
    """What is asked of a request with this seed raises."""
    own: Any = getattr(Request, name)

    def asked(self: Request, *args: Any) -> Any:
        if self.sampling.seed == seed and self.state.name != "ARRIVED":
            raise Broken
        return own.fget(self) if isinstance(own, property) else own(self, *args)

    patched = property(asked) if isinstance(own, property) else asked
    with mock.patch.object(Request, name, patched, create=True):
        yield


def check_one_fails(
    at: Simulated, names: tuple[str, ...], name: str, ask: Callable[[int], Record]
) -> None:
    """Of three at once; the next ones are served as before."""
    with breaking(name, 2):
        records = [ask(seed) for seed in (1, 2, 3)]
        at.pass_time(20.0)
    failed = records.pop(1)
    assert failed.error is not None and failed.error.status == 500, failed
    assert [record.finish_reason for record in records] == ["length", "length"]
    for one in names:
        assert not any(at.instance(one).live().values()), at.instance(one).live()
    again = ask(9)
    at.pass_time(10.0)
    assert again.finish_reason == "length"


@pytest.mark.parametrize(("topology", "names"), [("1e1p1d", ("p0", "d0")), ("1e1pd", ("pd0",))])
@pytest.mark.parametrize("name", ["num_left", "num_expected", "tokens", "num_promised"])
def test_a_request_that_cannot_be_planned_fails_alone(
    topology: str, names: tuple[str, ...], name: str
) -> None:
    with simulated(topology) as at:
        check_one_fails(at, names, name, lambda seed: at.ask(max_tokens=6, seed=seed))


def test_one_whose_part_of_a_step_cannot_be_made_fails_alone() -> None:
    def made(request: Request, *args: Any) -> Any:
        if request.sampling.seed == 2:
            raise Broken
        return sequence_of(request, *args)

    with simulated("1e1pd") as at, mock.patch("epd.roles.steps.requests.sequence_of", made):
        records = [at.ask(max_tokens=6, seed=seed) for seed in (1, 2, 3)]
        at.pass_time(20.0)
        failed = records.pop(1)
        assert failed.error is not None and failed.error.status == 500
        assert [record.finish_reason for record in records] == ["length"] * 2
        assert not any(at.instance("pd0").live().values())


def test_an_image_that_no_batch_can_have_fails_alone() -> None:
    with simulated("1e1pd") as at:
        preprocess = SimVisionEngine.preprocess

        async def broken(engine: Any, image: Any, *args: Any) -> Any:
            patches = await preprocess(engine, image, *args)
            is_it = golden.Image.parse(bytes(image)).name == "odd"
            return dataclasses.replace(patches, num_patches=None) if is_it else patches

        with mock.patch.object(SimVisionEngine, "preprocess", broken):
            records = [at.ask(Image(name), max_tokens=3) for name in ("one", "odd", "two")]
            at.pass_time(30.0)
        odd = records.pop(1)
        assert odd.error is not None and odd.error.kind is FailureKind.ENGINE, odd
        assert [record.finish_reason for record in records] == ["length"] * 2
        assert not any(at.instance("e0").live().values())


@pytest.mark.parametrize(("error", "num_faults"), [(RankLost("gone"), 0), (OSError("x"), 1)])
def test_the_loss_of_a_group_is_no_fault_of_its_encoder(error: Exception, num_faults: int) -> None:
    """F13, F29: images may be due in the instant in which the group has ended."""
    fails = mock.patch.object(SimVisionEngine, "encode", mock.AsyncMock(side_effect=error))
    with simulated("1epd") as at, fails:
        at.ask(Image("one"), max_tokens=2)
        at.pass_time(0.5)
        assert min(at.instance("epd0").actor.counters["faults"], 1) == num_faults


# --- what cannot be sent --------------------------------------------------------------------------


@contextmanager
def unsendable(at: Simulated, name: str, kind: str, *, chunks: int = 0) -> Iterator[None]:
    bus = at.world.network.buses[name]
    send = bus.send

    def refuse(to: str, message: Any, payloads: Any = ()) -> bool:
        is_it = type(message).__name__ == kind
        if is_it and len(getattr(message, "chunks", ())) >= chunks:
            raise Unsendable(f"{kind} cannot be sent: too long")
        return send(to, message, payloads)

    with mock.patch.object(bus, "send", refuse):
        yield


@pytest.mark.parametrize(
    ("name", "kind"), [(GATEWAY, "PrefillRequest"), (GATEWAY, "EncodeRequest"), ("p0", "KvOffer"),
                       ("d0", "Tokens")],
)  # fmt: skip
def test_what_cannot_be_sent_is_an_internal_error_at_once(name: str, kind: str) -> None:
    with simulated("1e1p1d") as at:
        with unsendable(at, name, kind):
            record = at.ask(Image("one"), max_tokens=3)
            at.pass_time(2.0)
        assert record.error is not None, record
        assert (record.error.kind, record.error.status) == (FailureKind.INTERNAL, 500)
        at.pass_time(10.0)
        for one in ("e0", "p0", "d0"):
            assert not any(at.instance(one).live().values()), at.instance(one).live()
        again = at.ask(max_tokens=3)
        at.pass_time(5.0)
        assert again.finish_reason == "length"


def test_tokens_of_others_go_alone() -> None:
    with simulated("1e1pd") as at:
        with unsendable(at, "pd0", "Tokens", chunks=2):
            records = [at.ask(max_tokens=5, seed=seed) for seed in (1, 2, 3)]
            at.pass_time(10.0)
        assert [record.finish_reason for record in records] == ["length"] * 3


def test_grants_that_nobody_asked_for_are_bounded_and_end() -> None:
    with simulated("1e1p1d") as at:
        region = at.instance("p0").embeddings
        assert region is not None
        grant = Grant(
            room="r",
            attempt=1,
            mm_hash="",
            region=region.region.remote,
            slots=(0,),
            contract=None,
            num_rows=1,
            deadline_s=1e12,
            gateway="gateway",
        )
        rooms = at.instance("e0").outgoing
        with mock.patch("epd.roles.outgoing.MAX_UNASKED", 5):
            for index in range(9):
                hear(at, "e0", "p0", msgspec.structs.replace(grant, room=f"r{index}"))
        counters = at.instance("e0").actor.counters
        assert (rooms.live()["outgoing"], counters["grants_not_asked_for"]) == (5, 4)
        at.pass_time(3 * at.settings.timing.link_timeout_s + 0.1)
        assert rooms.live()["outgoing"] == 0
