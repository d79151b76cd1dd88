"""What an instance refuses: in which words, and whether another attempt may do better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.config import DecodeConfig, EncodeConfig, PrefillConfig
from epd.fsm.membership import S
from epd.messages import (
    AbortRequest,
    Address,
    AtHand,
    CancelTransfer,
    EncodeAccepted,
    EncodeRejected,
    EncodeRequest,
    KvOffer,
    MediaItem,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    SamplingParams,
)
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY, Settings
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.engines import SimLanguageEngine
from epd_lab.sim.engine.golden import BLOCK_SIZE, Image
from tests.fsm.tables import at as in_state
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS, Simulated

NUM_BLOCKS = 8
FULL = NUM_BLOCKS * BLOCK_SIZE  # tokens
SETTINGS = Settings(
    encode=EncodeConfig(max_queue=2, max_batch_patches=64, cache_device_nbytes=2048),
    prefill=PrefillConfig(
        max_queue=2, pool_nbytes=4 * golden.ROW_NBYTES, slot_nbytes=4 * golden.ROW_NBYTES
    ),
    decode=DecodeConfig(max_queue=2, max_running=16),
    engine=DEFAULTS.engine,
    num_blocks=NUM_BLOCKS,
)
IMAGE = Image("one")


def due_s(cluster: Simulated) -> float:
    return cluster.gateway.actor.cluster_s() + 30.0


def item(room: str, image: Image = IMAGE) -> MediaItem:
    encoder = Address("e0", 1, "")
    return MediaItem(
        index=0,
        mm_hash="0" * 64,
        offset=1,
        num_rows=image.num_rows,
        grid_thw=image.grid_thw,
        room=room,
        encoder=encoder,
    )


def bury(desk: Desk) -> None:
    """The first attempt of r is called off before it comes."""
    desk.do(desk.actor.take, Received(GATEWAY, 1, AbortRequest(request_id="r", attempt=1)))


def drains(desk: Desk) -> None:
    in_state(desk.actor.memberships["gateway"], S.DRAINING)


def was_not_welcomed(desk: Desk) -> None:
    in_state(desk.actor.memberships["gateway"], S.JOINING)


# --- prefill --------------------------------------------------------------------------------------


def prompt(desk: Desk, request_id: str, num_tokens: int = 3, **other: Any) -> PrefillRequest:
    due = due_s(desk.cluster)
    made = PrefillRequest(
        request_id=request_id,
        attempt=1,
        token_ids=tuple(range(11, 11 + num_tokens)),
        num_emitted=0,
        items=(),
        sampling=SamplingParams(max_tokens=4),
        decode=Address("d0", 1, ""),
        gateway=Address(GATEWAY, 1, ""),
        deadline_s=due,
        first_token_deadline_s=due,
    )
    return msgspec.structs.replace(made, **other)


def refused(desk: Desk, message: PrefillRequest) -> tuple[str, bool] | None:
    """Kind, and whether it may be tried again; None: it is at work."""
    answers = desk.tell("on_prefill_request", message, GATEWAY)
    failed = [answer for answer in answers if isinstance(answer, RequestFailed)]
    assert len(failed) == (desk.whole.requests.get(f"{message.request_id}/1") is None)
    for one in failed:
        assert (one.request_id, one.attempt) == (message.request_id, 1) and one.failure.reason
        assert desk.said[-1][0] == GATEWAY
        rooms = [answer.room for answer in answers if isinstance(answer, CancelTransfer)]
        assert rooms == [item.room for item in message.items], "their encoders keep no rows"
        return one.failure.kind, one.failure.retryable
    return None


@pytest.mark.parametrize("plant", [drains, was_not_welcomed])
def test_a_prefill_instance_that_takes_no_work_says_that_another_may(plant: Any) -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        plant(at)
        assert refused(at, prompt(at, "r", 8, items=(item("r/1/0"),))) == ("away", True)


def test_a_prefill_instance_has_so_many_open() -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        assert [refused(at, prompt(at, f"r{n}")) for n in range(3)] == [None, None, ("busy", True)]


def test_a_text_only_model_takes_no_images() -> None:
    text_only = mock.patch.object(SimLanguageEngine, "row_contract", None)
    with text_only, desk("1p1d", "p0", "prefill", SETTINGS) as at:
        answers = at.tell("on_prefill_request", prompt(at, "r", 8, items=(item("r/1/0"),)), GATEWAY)
        (failed,) = answers
        assert isinstance(failed, RequestFailed)
        assert (failed.failure.kind, failed.failure.retryable) == ("media", False)


def test_images_that_the_pool_never_holds_are_refused_for_good() -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        one = item("a/1/0")
        assert refused(at, prompt(at, "a", 9, items=(one,))) is None
        two = (one, item("b/1/1"))
        assert refused(at, prompt(at, "b", 9, items=two)) == ("capacity", False)


@pytest.mark.parametrize(
    ("num_tokens", "here", "outcome"),
    [
        (FULL, False, None),
        (FULL + 1, False, ("capacity", False)),
        (FULL - 4, True, None),
        (FULL - 3, True, ("capacity", False)),
    ],
)
def test_a_prompt_that_the_pool_never_holds_is_refused_for_good(
    num_tokens: int, outcome: Any, *, here: bool
) -> None:
    """With its answer, where it is decoded here."""
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        decode = at.role.actor.address if here else Address("d0", 1, "")
        assert refused(at, prompt(at, "r", num_tokens, decode=decode)) == outcome


def test_what_was_said_already_needs_no_place() -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        decode = at.role.actor.address
        again = prompt(at, "r", FULL, decode=decode, num_emitted=4)
        assert refused(at, again) is None


def test_a_prompt_that_ended_here_is_not_begun_again() -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        bury(at)
        answers = at.tell("on_prefill_request", prompt(at, "r", 8, items=(item("r/1/0"),)), GATEWAY)
        assert answers == [
            CancelTransfer(room="r/1/0", attempt=1),
            RequestAborted(request_id="r", attempt=1),
        ]
        assert at.whole.requests.get("r/1") is None


def test_a_prompt_that_is_repeated_is_begun_once() -> None:
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        assert refused(at, prompt(at, "r")) is None
        begun = at.whole.requests.get("r/1")
        assert at.tell("on_prefill_request", prompt(at, "r"), GATEWAY) == []
        assert at.whole.requests.get("r/1") is begun


# --- decode ---------------------------------------------------------------------------------------


def offer(desk: Desk, request_id: str, num_tokens: int = 3, **other: Any) -> KvOffer:
    due = due_s(desk.cluster)
    made = KvOffer(
        room=f"{request_id}/1/kv",
        request_id=request_id,
        attempt=1,
        num_prompt_tokens=num_tokens,
        num_emitted=0,
        token_ids=tuple(range(11, 11 + num_tokens)),
        sampling=SamplingParams(max_tokens=4),
        layout=golden.KV_LAYOUT,
        gateway=Address(GATEWAY, 1, ""),
        deadline_s=due,
        first_token_deadline_s=due,
    )
    return msgspec.structs.replace(made, **other)


def declined(desk: Desk, message: KvOffer) -> tuple[str, bool] | None:
    answers = desk.tell("on_kv_offer", message, "p0")
    cancels = [answer for answer in answers if isinstance(answer, CancelTransfer)]
    assert len(cancels) == (desk.whole.requests.get(f"{message.request_id}/1") is None)
    for one in cancels:
        assert one.room == message.room and one.failure is not None
        assert one.failure.reason and desk.said == [("p0", one)]
        return one.failure.kind, one.failure.retryable
    return None


@pytest.mark.parametrize("plant", [drains, was_not_welcomed])
def test_a_decode_instance_that_takes_no_work_says_that_another_may(plant: Any) -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        plant(at)
        assert declined(at, offer(at, "r")) == ("away", True)


def test_a_decode_instance_has_so_many_open() -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        found = [declined(at, offer(at, f"r{n}")) for n in range(3)]
        assert found == [None, None, ("busy", True)]


def test_another_layout_of_kv_is_refused_for_good() -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        other = msgspec.structs.replace(golden.KV_LAYOUT, dtype="float16")
        assert declined(at, offer(at, "r", layout=other)) == ("contract", False)


def test_an_adapter_that_is_not_held_is_refused_for_good() -> None:
    """By prefill and by decode, whatever the gateway believed; where it is held, it is taken."""
    with desk("1e1p1d", "p0", "prefill", SETTINGS) as at:
        assert refused(at, prompt(at, "r", adapter="pirate")) == ("contract", False)
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        assert declined(at, offer(at, "r", adapter="pirate")) == ("contract", False)
    holding = replace(SETTINGS, adapters=("pirate",))
    with desk("1e1p1d", "p0", "prefill", holding) as at:
        assert refused(at, prompt(at, "r", adapter="pirate")) is None
    with desk("1e1p1d", "d0", "decode", holding) as at:
        assert declined(at, offer(at, "r", adapter="pirate")) is None
        assert declined(at, offer(at, "s", adapter="poet")) == ("contract", False)


@pytest.mark.parametrize(
    ("num_tokens", "num_emitted", "outcome"),
    [
        (FULL - 4, 0, None),
        (FULL - 3, 0, ("capacity", False)),
        (FULL - 3, 1, None),
    ],
)
def test_kv_that_the_pool_never_holds_is_refused_for_good(
    num_tokens: int, num_emitted: int, outcome: Any
) -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        assert declined(at, offer(at, "r", num_tokens, num_emitted=num_emitted)) == outcome


def test_kv_that_landing_memory_never_holds_is_refused_for_good() -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        engine = at.whole.requests.engine
        with mock.patch.multiple(engine, num_landing_blocks=2, kv_in_place=False):
            assert declined(at, offer(at, "a", 2 * BLOCK_SIZE)) is None
            assert declined(at, offer(at, "b", 2 * BLOCK_SIZE + 1)) == ("capacity", False)


def test_an_offer_of_the_lost_or_of_what_is_open_is_not_answered() -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        assert declined(at, offer(at, "r")) is None
        begun = at.whole.requests.get("r/1")
        assert at.tell("on_kv_offer", offer(at, "r"), "p0") == []
        assert at.whole.requests.get("r/1") is begun
        at.role.actor.lost.add(("p0", 1))
        assert at.tell("on_kv_offer", offer(at, "s"), "p0") == []
        assert at.whole.requests.get("s/1") is None


def test_an_offer_for_what_has_ended_here_is_not_wanted() -> None:
    with desk("1e1p1d", "d0", "decode", SETTINGS) as at:
        bury(at)
        assert at.tell("on_kv_offer", offer(at, "r"), "p0") == [
            CancelTransfer(room="r/1/kv", attempt=1)
        ]
        assert at.whole.requests.get("r/1") is None


# --- encode ---------------------------------------------------------------------------------------


def drawn_image(desk: Desk, room: str, consumer: Address | None = None) -> EncodeRequest:
    return EncodeRequest(
        request_id="r",
        attempt=1,
        room=room,
        mm_hash=f"{room:0>64}",
        num_rows=IMAGE.num_rows,
        grid_thw=IMAGE.grid_thw,
        consumer=consumer,
        first_token_deadline_s=1e12,
    )


def accepted(desk: Desk, message: EncodeRequest, *payloads: bytes) -> bool:
    """Or the reason is told."""
    said = desk.tell("on_encode_request", message, GATEWAY, *payloads)
    (answer,) = (one for one in said if not isinstance(one, AtHand))
    if isinstance(answer, EncodeRejected):
        assert (answer.request_id, answer.attempt, answer.room) == ("r", 1, message.room)
        assert answer.failure.reason
        return False
    assert answer == EncodeAccepted(room=message.room, attempt=1)
    return True


@pytest.mark.parametrize("plant", [drains, was_not_welcomed])
def test_an_encoder_that_takes_no_work_says_so(plant: Any) -> None:
    with desk("1e1p1d", "e0", "encode", SETTINGS) as at:
        plant(at)
        assert not accepted(at, drawn_image(at, "a"), IMAGE.image())
        assert not at.role.encodings


def test_an_encoder_has_so_many_open_and_takes_each_once() -> None:
    with desk("1e1p1d", "e0", "encode", SETTINGS) as at:
        asked = [drawn_image(at, room) for room in "abc"]
        assert [accepted(at, one, IMAGE.image()) for one in asked] == [True, True, False]
        assert accepted(at, asked[0], IMAGE.image()), "it is at work"
        assert at.role.live()["encode_askers"] == 2


def test_an_encoder_needs_the_image_and_who_wants_it() -> None:
    with desk("1e1p1d", "e0", "encode", SETTINGS) as at:
        assert not accepted(at, drawn_image(at, "a"))
        assert not accepted(at, drawn_image(at, "a"), IMAGE.image(), b"more")
        prefill = Address("p0", 1, "")
        assert accepted(at, drawn_image(at, "b", prefill), IMAGE.image())
        at.role.actor.lost.add(("p0", 1))
        assert not accepted(at, drawn_image(at, "c", prefill), IMAGE.image())
