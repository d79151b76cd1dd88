"""What two data planes say to each other beside the payload: see `wire` and `links`."""

from __future__ import annotations

from typing import Any

import msgspec

from epd.messages import Message


class Challenge(Message):
    """First message of a listener."""

    nonce: bytes


class Hello(Message):
    """Who calls, whom it means, and the proof that it holds the cluster key.

    `succeeds`: earlier connections of this caller are over; none of their bytes may land any more.
    """

    version: int
    instance_id: str
    epoch: int
    to_instance_id: str
    to_epoch: int
    succeeds: bool
    nonce: bytes
    proof: bytes


class Accepted(Message):
    proof: bytes


class Refused(Message):
    """`kind`: "gone" (another life answers here), "fenced" (severed and barred), or empty."""

    kind: str
    reason: str


class Announced(Message):
    """A write: `nbytes` that belong into `slots` of a region of this shape."""

    number: int
    region_id: str
    slot_nbytes: int
    num_slots: int
    slots: tuple[int, ...]
    nbytes: int


class WriteFrame(Announced):
    """Its payload follows."""

    checksum: bool  # of what has landed is asked for


class BeginFrame(Announced):
    """May I write this by other means (mooncake)?  `ended`: earlier writes that are over."""

    token: bytes  # names the write on every connection
    ended: tuple[bytes, ...]


class EndFrame(Message):
    """Writes that have a definite end."""

    tokens: tuple[bytes, ...]


class SettleFrame(Message):
    """Writes whose end is in doubt and whose connections are closed: has all of it arrived?"""

    number: int
    tokens: tuple[bytes, ...]


class Done(Message):
    """Yes: it has landed, it may begin, it is settled; whatever was asked."""

    number: int
    checksum: int = 0


class Declined(Message):
    """No; nothing has landed, or not all."""

    number: int
    reason: str


Frame = (
    Challenge | Hello | Accepted | Refused | WriteFrame | BeginFrame | EndFrame | SettleFrame
    | Done | Declined
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Message) -> bytes:
    return _encoder.encode(frame)


def decode(body: memoryview) -> Any:
    """A `Frame`.  Raises msgspec.MsgspecError (a ValueError) on anything else."""
    return _decoder.decode(body)
