"""The machines, each with a way to make one and to make each of its events."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

from epd.failure import Failure, FailureKind
from epd.frontend import Adapter, TimeLimits
from epd.fsm import (
    adapter,
    child,
    embedding,
    encoding,
    fan_out,
    generation,
    group,
    incoming,
    instance,
    link,
    membership,
    offer,
    outgoing,
    request,
)
from epd.fsm.kernel import NULL_JOURNAL, Event, Journal
from epd.layouts import KvLayout
from epd.messages import Grant, KvOffer, MoveRequest
from epd.observed import Wait
from epd.records import (
    Address,
    InstanceInfo,
    Load,
    RemoteRegion,
    RowContract,
    SamplingParams,
    TokenLogprobs,
)

PEER = Address("peer", 1, "")
LIMITS = TimeLimits(1.0, 1.0, 1.0)
CLIENT: Any = object()  # who waits for an answer
CONTRACT = RowContract(hidden=8, row_width=16, num_deepstack=1, dtype="f16", row_nbytes=32)
REGION = RemoteRegion(
    backend="shm",
    instance_id="peer",
    epoch=1,
    region_id="rows",
    locator="",
    slot_nbytes=64,
    num_slots=8,
)
GRANT = Grant(
    room="room",
    attempt=1,
    mm_hash="",
    region=REGION,
    slots=(0, 1),
    contract=CONTRACT,
    num_rows=4,
    deadline_s=9.0,
    gateway="g",
)
MANIFEST = outgoing.Manifest(CONTRACT, 4)
LAYOUT = KvLayout(
    num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="f32", block_nbytes=64
)
OFFER = KvOffer(
    room="room",
    request_id="r",
    attempt=1,
    num_prompt_tokens=4,
    num_emitted=0,
    token_ids=(1, 2, 3, 4),
    sampling=SamplingParams(max_tokens=1),
    layout=LAYOUT,
    gateway=PEER,
    deadline_s=9.0,
)
MOVE = MoveRequest(request_id="r", attempt=2, former=1, decode=PEER, first_token_deadline_s=9.0)
WAIT = Wait(what="step", for_s=2.0, bound_s=1.0)
FAILURE = Failure(FailureKind.ENGINE, "because")
KV = SimpleNamespace(num_tokens=7, rope_delta=-3, num_cached=4, first_token=TokenLogprobs(5, 0.0))
MESSAGE = SimpleNamespace(
    request_id="r",
    attempt=1,
    num_emitted=0,
    sampling=None,
    gateway=PEER,
    deadline_s=9.0,
    items=(SimpleNamespace(room="a", offset=1, end=2), SimpleNamespace(room="b", offset=2, end=3)),
)

PLACEMENT: Any = SimpleNamespace(prefill=PEER, decode=PEER)
HOLDER = InstanceInfo(address=PEER, roles=(), host_id="", pid=7)

# What an event carries, by the name of the field; the same for every machine.
CARRIES: dict[str, Any] = {
    "ahead": False, "asker": print, "attempt": 1, "beat_s": 0.25, "blocks": (3, 4), "checksum": 11,
    "chunk": SimpleNamespace(attempt=1, token_ids=(5, 6), finish_reason="stop"),
    "cluster_s": 5.0, "due_s": 9.0, "left_s": 3.0,
    "command": "command", "encoder": PEER, "exit_status": 1, "failed": False, "failure": FAILURE,
    "finish_reason": "stop", "former_epoch": 1, "grant": GRANT, "holder": HOLDER, "image": b"image",
    "index": 0, "info": HOLDER, "instance": PEER, "item": "item", "kind": "engine", "kv": KV,
    "load": Load(), "move": MOVE, "num_cached": 4, "serial": 0,
    "nbytes": 64, "new_room": "room.1", "num_held": 1, "num_instances": 1, "num_layers": 1,
    "num_tokens": 2, "number": 1, "part": 0, "parts": ((64, 11),), "passed": {},
    "patches": "patches", "placement": PLACEMENT,
    "prompt": "prompt", "owner": "owner", "manifest": MANIFEST, "gateway_epoch": 1, "epoch": 2,
    "instance_id": "peer", "at_s": 5.0, "rank": 1, "reason": "because", "retryable": True,
    "retry_after_s": 2.0, "room": "room", "rows": "rows", "slots": (1, 2), "start": 0,
    "states_kept": {2: (8,)}, "token": TokenLogprobs(9, 0.0), "version": 1,
}  # fmt: skip


def make_event(kind: type[Event], /, **carried: Any) -> Event:
    """An event with plausible contents; `carried` replaces some."""
    values = {
        field.name: carried[field.name] if field.name in carried else CARRIES[field.name]
        for field in fields(kind)  # type: ignore[arg-type]
        if field.name in carried or field.default is MISSING
    }
    return kind(**values)


def make_generation(journal: Journal = NULL_JOURNAL) -> generation.Generation:
    return generation.Generation("g", 2, LIMITS, CLIENT, journal)


def make_request(
    journal: Journal = NULL_JOURNAL, *, images: int = 2, **facts: Any
) -> request.Request:
    message: Any = SimpleNamespace(**vars(MESSAGE) | {"items": MESSAGE.items[:images]})
    return request.Request("r/1", message, (1, 2, 3), journal, **facts)


def launch(machine: request.Request, *counts: int) -> request.Request:
    """With steps under way that compute so many tokens each."""
    for count in counts:
        machine.fire(request.StepLaunched(count, ahead=False))
    return machine


def make_encoding(
    journal: Journal = NULL_JOURNAL, *, stored: bool = False, encodes: bool = True
) -> encoding.Encoding:
    return encoding.Encoding(
        "hash", b"image", (1, 4, 4), journal, num_rows=4, stored=stored, encodes=encodes
    )


def make_embedding(journal: Journal = NULL_JOURNAL) -> embedding.Embedding:
    return embedding.Embedding("hash", journal)


def make_outgoing(journal: Journal = NULL_JOURNAL) -> outgoing.Outgoing:
    made = outgoing.Outgoing("room", 1, PEER, journal)
    made.owner, made.manifest = "owner", MANIFEST
    return made


def make_incoming(journal: Journal = NULL_JOURNAL) -> incoming.Incoming:
    return incoming.Incoming("room", 1, PEER, "owner", 4, 9.0, "g", journal)


def make_granted() -> outgoing.Outgoing:
    """With what guards and actions read, in whatever state it is put."""
    made = make_outgoing()
    made.grant, made.nbytes, made.failure = GRANT, 64, FAILURE
    return made


def make_instance(journal: Journal = NULL_JOURNAL) -> instance.Instance:
    info: Any = SimpleNamespace(address=PEER)
    return instance.Instance(info, CARRIES["load"], 0.0, journal)


def make_link(journal: Journal = NULL_JOURNAL) -> link.Link:
    return link.Link(PEER, journal)


def make_membership(journal: Journal = NULL_JOURNAL) -> membership.Membership:
    return membership.Membership("e0:1", journal)


def make_offer(journal: Journal = NULL_JOURNAL) -> offer.Offer[str]:
    return offer.Offer("r/1", {"room": "image", "other": "image"}, journal)


def make_child(journal: Journal = NULL_JOURNAL) -> child.Child:
    return child.Child("e0", journal)


def make_group(journal: Journal = NULL_JOURNAL) -> group.Group:
    return group.Group("pd0", 3, journal)


def make_adapter(journal: Journal = NULL_JOURNAL) -> adapter.LoadedAdapter:
    return adapter.LoadedAdapter(Adapter("pirate", "digest"), "below/pirate", journal)


def make_fan_out(journal: Journal = NULL_JOURNAL) -> fan_out.FanOut:
    return fan_out.FanOut("r/1/kv+0", 2, journal)
