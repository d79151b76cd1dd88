"""The rooms of one instance of a simulated cluster; a test speaks as its peers."""

from __future__ import annotations

from typing import Any
from unittest import mock

from epd.fsm.incoming import Incoming
from epd.fsm.outgoing import Manifest
from epd.messages import (
    Address,
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    Grant,
    RemoteRegion,
    TransferAborted,
    TransferInDoubt,
)
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
PEER = Address("d0", 1, "")
REGION = RemoteRegion(
    backend="sim",
    instance_id="d0",
    epoch=1,
    region_id="kv",
    locator="",
    slot_nbytes=16,
    num_slots=4,
)
OFFER: Any = "an offer"


def rooms(end: str = "outgoing") -> Any:
    """Of p0."""
    return desk("1e1p1d", "p0", end)


def due_s(at: Desk, left_s: float = 25.0) -> float:
    return at.actor.cluster_s() + left_s


def produce(at: Desk, room: str = "r", *, offers: bool = True, peer: Address = PEER) -> Any:
    """A room that p0 fills; its owner."""
    owner = mock.Mock()
    manifest = Manifest(None, 1, OFFER if offers else None)
    at.do(at.role.open, room, 1, peer, owner, "key", manifest, due_s(at), "gateway")
    return owner


def consume(at: Desk, room: str = "r", peer: Address = PEER) -> tuple[Any, Incoming]:
    made = mock.Mock(region=REGION, slots=(0,))
    owner = mock.Mock(grant=mock.Mock(return_value=made))
    at.do(at.role.open, room, 1, peer, owner, "key", 1, due_s(at), "gateway")
    return owner, at.role.find(room)


def grant(at: Desk, room: str = "r", left_s: float = 20.0) -> Grant:
    return Grant(
        room=room,
        attempt=1,
        mm_hash="",
        region=REGION,
        slots=(0,),
        contract=None,
        num_rows=1,
        deadline_s=due_s(at, left_s),
        gateway="gateway",
    )


def hear(at: Desk, word: Any, epoch: int = 1, source: str = "d0") -> list[Any]:
    methods = {
        Grant: "on_grant",
        CancelTransfer: "on_cancel",
        Commit: "on_commit",
        CancelAck: "on_cancel_ack",
        TransferAborted: "on_aborted",
        TransferInDoubt: "on_doubt",
        CommitAck: "on_commit_ack",
    }
    return at.tell(methods[type(word)], word, source, epoch=epoch)
