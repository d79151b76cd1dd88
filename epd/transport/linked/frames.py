"""What goes between two data planes beside the payload: see `wire` and `links`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from epd.messages import Message
from epd.ranges import Checksum, Count, Id, Index, Name, NumBytes, Positive, Total

HostId = Annotated[str, msgspec.Meta(max_length=200)]


class Challenge(Message):
    """First message of a listener."""

    nonce: bytes


class Hello(Message):
    """Who calls, whom it means, and the proof that it holds the cluster key.

    `succeeds`: earlier connections of this caller are over; none of their bytes may land any more.
    """

    version: Count
    instance_id: Name
    epoch: Total
    to_instance_id: Name
    to_epoch: Total
    succeeds: bool
    host_id: HostId
    nonce: bytes
    proof: bytes


class Accepted(Message):
    host_id: HostId
    proof: bytes


class Refused(Message):
    """`kind`: "gone" (another life answers here), "fenced" (severed and barred), or empty."""

    kind: str
    reason: str


class Announced(Message):
    """A write: `nbytes` that belong into `slots` of a region of this shape."""

    number: Total
    region_id: Id
    slot_nbytes: Positive
    num_slots: Positive
    slots: tuple[Index, ...]
    nbytes: NumBytes

    def __post_init__(self) -> None:
        if self.nbytes > len(self.slots) * self.slot_nbytes:
            raise ValueError(f"{self.nbytes} bytes do not fit {len(self.slots)} slots")


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

    number: Total
    tokens: tuple[bytes, ...]


class GoneFrame(Message):
    """Has this process of your host ended, and has your kernel nothing more of it for our ports?"""

    number: Total
    pid: Total
    ports: tuple[Index, ...]


class Done(Message):
    """Yes: it has landed, it may begin, it is settled; whatever was asked."""

    number: Total
    checksum: Checksum = 0


class Declined(Message):
    """No; nothing has landed, or not all."""

    number: Total
    reason: str


Frame = (
    Challenge | Hello | Accepted | Refused | WriteFrame | BeginFrame | EndFrame | SettleFrame
    | GoneFrame | Done | Declined
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Message) -> bytes:
    return _encoder.encode(frame)


def decode(body: memoryview) -> Any:
    """A `Frame`.  Raises msgspec.MsgspecError (a ValueError) on anything else."""
    return _decoder.decode(body)
