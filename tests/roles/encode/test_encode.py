"""An encoder: rooms without a consumer, images that take too long, and how far it runs ahead."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.config import EncodeConfig
from epd.errors import MediaError
from epd.failure import FailureKind
from epd.fsm import encoding as fsm
from epd.fsm.encoding import S
from epd.messages import (
    AbortEncode,
    Address,
    CancelTransfer,
    Clip,
    EncodeAccepted,
    EncodeRequest,
    PixelBounds,
    RequestFailed,
    RowsKept,
)
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.engines import SimVisionEngine
from epd_lab.sim.engine.golden import ROW_CONTRACT, ROW_NBYTES, Image
from epd_lab.sim.workload import mm_hash_of
from tests.roles.desk import Desk, desk
from tests.roles.rooms import REGION, grant
from tests.roles.simulated import DEFAULTS

PREFILL = Address("p0", 1, "")
IMAGE, OTHER = Image("one"), Image("two")
NBYTES = IMAGE.num_rows * ROW_NBYTES
LIMIT_S = 0.4  # of an image
QUICK = msgspec.structs.replace(DEFAULTS.timing, first_token_timeout_s=LIMIT_S)
IMPATIENT = dataclasses.replace(DEFAULTS, timing=QUICK)
SHARED = EncodeConfig(cache_dir="/rows", send_buffer_nbytes=4096)


def ask(at: Desk, room: str, image: Image = IMAGE, *, kept: bool = False, **other: Any) -> None:
    """The gateway wants its rows under this room: for p0, or kept."""
    consumer = None if kept else PREFILL
    grid, key = image.grid_thw, mm_hash_of(image)
    due_s = at.cluster.gateway.actor.cluster_s() + 30.0
    asked = EncodeRequest(
        request_id="r",
        attempt=1,
        room=room,
        mm_hash=key,
        num_rows=image.num_rows,
        grid_thw=grid,
        consumer=consumer,
        first_token_deadline_s=due_s,
    )
    message = msgspec.structs.replace(asked, **other)
    said = at.tell("on_encode_request", message, GATEWAY, image.image())
    assert said[0] == EncodeAccepted(room=room, attempt=1)


def rooms(at: Desk, image: Image = IMAGE) -> list[str]:
    encoding = at.role.encodings.get(mm_hash_of(image))
    return list(encoding.rooms) if encoding is not None else []


def test_rows_that_are_kept_are_told_and_their_room_is_closed() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        for room in ("a", "b"):  # encoded, then found
            ask(at, room, kept=True)
            at.cluster.pass_time(0.3)
            assert (GATEWAY, RowsKept(request_id="r", attempt=1, room=room)) in at.said
            assert not rooms(at) and at.role.live()["encode_askers"] == 0
        assert at.role.num_encoded == 1


def test_a_room_without_a_consumer_ends_when_it_is_called_off() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        at.cluster.node("e0").devices[0].hung = True
        ask(at, "a", kept=True)
        ask(at, "b", kept=True)
        assert rooms(at) == ["a", "b"]
        for _ in range(2):
            at.tell("on_abort_encode", AbortEncode(room="a"), GATEWAY)
            assert rooms(at) == ["b"] and at.role.live()["encode_askers"] == 1
        at.tell("on_abort_encode", AbortEncode(room="never heard of"), GATEWAY)
        assert rooms(at) == ["b"]


def test_a_room_with_a_consumer_ends_when_it_is_called_off() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        at.cluster.node("e0").devices[0].hung = True
        ask(at, "a")
        at.tell("on_abort_encode", AbortEncode(room="a"), GATEWAY)
        transfer = at.cluster.instance("e0").outgoing.find("a")
        assert transfer is not None and transfer.terminal
        assert not rooms(at) and at.role.live()["encode_askers"] == 0


def test_a_gateways_life_takes_its_rooms_without_a_grant_along() -> None:
    """Also while rows are made: nobody else would ever close such a room."""
    with desk("1e1p1d", "e0", "encode") as at:
        at.cluster.node("e0").devices[0].hung = True
        ask(at, "a")
        ask(at, "b", kept=True)
        ask(at, "c", OTHER, kept=True)
        at.do(at.role.peer_lost, Address(GATEWAY, 2, ""))
        at.do(at.role.peer_lost, Address("p0", 1, ""))
        assert rooms(at) == ["a", "b"] and rooms(at, OTHER) == ["c"]
        at.do(at.role.peer_lost, Address(GATEWAY, 1, ""))
        assert at.cluster.instance("e0").outgoing.find("a").terminal
        assert not rooms(at) and not rooms(at, OTHER) and at.role.live()["encode_askers"] == 0


@pytest.mark.parametrize("kept", [True, False])
def test_a_device_that_hangs_fails_the_image_in_time_and_is_told_of(*, kept: bool) -> None:
    with desk("1e1p1d", "e0", "encode", IMPATIENT) as at:
        at.cluster.node("e0").devices[0].hung = True
        ask(at, "a", kept=kept)
        encoding = at.role.encodings[mm_hash_of(IMAGE)]
        at.cluster.pass_time(0.9 * LIMIT_S)
        assert encoding.state is S.ENCODING
        at.cluster.pass_time(0.2 * LIMIT_S)
        assert encoding.state is S.ABANDONED and not rooms(at)
        assert at.role.live()["encodings"] == 1, "the tower is at it all the same"
        told = RequestFailed(request_id="r", attempt=1, failure=encoding.failure)
        assert ((GATEWAY, told) in at.said) == kept
        assert (encoding.failure.kind, at.actor.counters["device_hangs"]) == ("engine", 0)
        at.cluster.pass_time(LIMIT_S)
        assert encoding.state is S.FAILED
        assert at.actor.counters["device_hangs"] == 1
        assert any("does not answer" in line for line in at.cluster.node("e0").warnings)
        assert not at.role.encodings and not at.actor.timers.runs(encoding, fsm.EncodeTimedOut)


def test_an_image_whose_cancel_came_first_is_not_begun() -> None:
    """F42."""
    with desk("1e1p1d", "e0", "encode") as at:
        outgoing = at.cluster.instance("e0").outgoing
        at.do(outgoing.on_cancel, Received("p0", 1, CancelTransfer(room="a", attempt=1)))
        ask(at, "a")
        assert not at.role.encodings and at.role.live()["encode_askers"] == 0


def test_what_is_said_of_a_video_or_of_bounds_goes_to_the_engine() -> None:
    clip, bounds = Clip(container="webm", frames=(1, 2)), PixelBounds(min_pixels=3, max_pixels=4)
    with desk("1e1p1d", "e0", "encode") as at:
        broken = MediaError("broken")
        with mock.patch.object(SimVisionEngine, "preprocess", side_effect=broken) as preprocess:
            ask(at, "a", clip=clip, bounds=bounds)
        given = preprocess.call_args.args[:4]
        assert given == (IMAGE.image(), IMAGE.grid_thw, clip, bounds)


def test_an_engine_that_answers_for_fewer_images_than_it_was_given_is_a_fault() -> None:
    async def none(engine: Any, batch: Any) -> list[Any]:
        return []

    with desk("1e1p1d", "e0", "encode") as at:
        with mock.patch.object(SimVisionEngine, "encode", none):
            ask(at, "a")
            at.cluster.pass_time(0.1)
        assert at.actor.counters["faults"] == 1


# --- running ahead --------------------------------------------------------------------------------

NARROW = dataclasses.replace(
    DEFAULTS, encode=EncodeConfig(max_batch_patches=64, cache_device_nbytes=NBYTES)
)


def hear(at: Desk, room: str) -> None:
    """p0 has memory for its rows."""
    region = msgspec.structs.replace(REGION, instance_id="p0")
    word = msgspec.structs.replace(grant(at, room), region=region, contract=ROW_CONTRACT)
    at.do(at.whole.outgoing.on_grant, Received("p0", 1, word))


@pytest.mark.parametrize("room", "bcd")
def test_any_of_its_rooms_may_have_the_grant_that_lets_an_image_begin(room: str) -> None:
    with desk("1e1p1d", "e0", "encode", NARROW) as at:
        ask(at, "a")
        for name in "bcd":
            ask(at, name, OTHER)
        assert at.role.live()["encodes_deferred"] == 1
        hear(at, room)
        assert at.role.live()["encodes_deferred"] == 0


def test_a_grant_that_was_faster_than_its_request_lets_the_image_begin() -> None:
    with desk("1e1p1d", "e0", "encode", NARROW) as at:
        ask(at, "a")
        ask(at, "b", OTHER)
        hear(at, "c")
        assert at.role.live()["encodes_deferred"] == 1
        ask(at, "c", OTHER)
        assert at.role.live()["encodes_deferred"] == 0


def test_an_image_counts_as_begun_until_its_work_has_ended() -> None:
    """It may be wanted again until then: nothing else begins in its place."""
    with desk("1e1p1d", "e0", "encode") as at:
        ask(at, "a", kept=True)
        ask(at, "b", kept=True)
        for room in "ab":
            at.tell("on_abort_encode", AbortEncode(room=room), GATEWAY)
            assert at.role.live()["encode_run_ahead"] == NBYTES
        at.cluster.pass_time(0.3)
        assert at.role.live()["encode_run_ahead"] == 0


def test_pixels_count_until_there_are_rows_and_others_wait_for_them() -> None:
    few = dataclasses.replace(DEFAULTS, encode=EncodeConfig(pixels_nbytes=100))
    with desk("1e1p1d", "e0", "encode", few) as at:
        for room, name in zip("abcd", ("one", "two", "three", "four"), strict=True):
            ask(at, room, Image(name), pixels_nbytes=40)
        live = at.role.live
        assert (live()["pixels_nbytes"], live()["encodes_deferred"]) == (80, 2)
        at.tell("on_abort_encode", AbortEncode(room="c"), GATEWAY)
        at.tell("on_abort_encode", AbortEncode(room="a"), GATEWAY)
        assert (live()["pixels_nbytes"], live()["encodes_deferred"]) == (80, 1), "a thread has it"
        at.cluster.pass_time(0.3)
        assert (live()["pixels_nbytes"], live()["encodes_deferred"]) == (0, 0)


def test_who_waits_for_pixels_fails_in_its_time() -> None:
    """F4: whoever holds them hangs."""
    timing = msgspec.structs.replace(DEFAULTS.timing, first_token_timeout_s=0.01)
    few = dataclasses.replace(DEFAULTS, timing=timing, encode=EncodeConfig(pixels_nbytes=50))
    with desk("1e1p1d", "e0", "encode", few) as at:
        ask(at, "a", Image("one", flaw="slow"), pixels_nbytes=40)
        ask(at, "b", OTHER, pixels_nbytes=40)
        waiting = at.role.encodings[mm_hash_of(OTHER)]
        assert waiting.state is S.DEFERRED
        at.cluster.pass_time(0.015)
        assert waiting.state is S.FAILED and "in time" in waiting.failure.reason


def test_rows_that_are_wanted_again_count_as_begun() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        ask(at, "a", kept=True)
        at.cluster.pass_time(0.3)
        assert at.role.live()["encode_run_ahead"] == 0
        ask(at, "b")  # not granted yet
        assert at.role.live()["encode_run_ahead"] == NBYTES


def test_who_only_finds_rows_makes_none_and_has_no_memory_to_send_them_from() -> None:
    with desk("1e1p1d", "p0", "encode", dataclasses.replace(DEFAULTS, encode=SHARED)) as at:
        assert at.role.producer.ring is None
        ask(at, "a", kept=True)
        at.cluster.pass_time(0.3)
        (failed,) = [message for message in at.messages() if isinstance(message, RequestFailed)]
        assert failed.failure.kind is FailureKind.ABSENT


def test_a_room_that_is_closed_already_is_not_closed_again() -> None:
    """Or rows that were moved down would be taken up again, for nobody."""
    with desk("1e1p1d", "e0", "encode") as at:
        ask(at, "a", kept=True)
        at.cluster.pass_time(0.3)
        for owner in (mm_hash_of(IMAGE), "nobody"):
            closed = SimpleNamespace(key="a", owner=owner, nbytes=0)
            with mock.patch.object(at.role, "post") as post:
                at.do(at.role.producer.concluded, closed, None)
            post.assert_not_called()


def test_a_late_outcome_of_what_has_ended_changes_no_book() -> None:
    with desk("1e1p1d", "e0", "encode") as at:
        ask(at, "a", kept=True)
        at.cluster.pass_time(0.3)
        (encoding,) = at.role.encodings.values()
        at.do(at.role.fire, encoding, fsm.EvictionRequested())
        assert encoding.terminal and not at.role.encodings and not at.role.live()["encoding_rooms"]
        ask(at, "b", kept=True)
        (again,) = at.role.encodings.values()
        at.do(at.role.fire, encoding, fsm.EvictionRequested())
        assert at.role.encodings[encoding.key] is again
        assert at.role.live()["encodings"] == 1
