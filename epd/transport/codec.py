"""Frames of the control plane: what goes on the wire and what is let in from it.

A bus message is `[header, payload, ...]`.  The header is one msgpack `Envelope`; payloads are raw
bytes (compressed images) and are never parsed here.  Everything that arrives is hostile until
`unpack` has passed it: it raises `FrameRejected` with a `kind` that is counted, and nothing else,
whatever the bytes are.  A connection has no name that a peer could choose, so none can take over
another's (fault F48).  The header names the sender, and is believed: whoever may connect has the
cluster's key, or may enter the user's own directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd.messages import MESSAGES, PROTOCOL_VERSION, Address, AnyMessage, Message
from epd.ranges import Name, Total
from epd.transport.base import Buffer, Received, TransportError, Unsendable

NAMES = frozenset(message.__name__ for message in MESSAGES)
MAX_TOLD_NBYTES = 64 << 10  # of a header that is looked into once more to name its type and source
INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: the sender and its life, the message, and the life it is meant for."""

    version: int
    source: Name  # instance id
    epoch: Total
    message: AnyMessage
    target_epoch: Total = 0  # the life it is meant for; 0: any (it has not met the peer yet)


encode: Callable[[Envelope], bytes] = msgspec.msgpack.Encoder().encode
"""Envelope to header frame."""

decode: Callable[[Any], Envelope] = msgspec.msgpack.Decoder(Envelope).decode
"""Header frame to envelope.  Raises msgspec.MsgspecError (a ValueError) on anything else."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The bounds of one bus message; above them it is dropped and counted.

    The header bound also bounds the time of the loop for one hostile header (well under 0.2 s for 4
    MiB); a prompt of 500k tokens fits.
    """

    max_header_nbytes: int = 4 << 20
    max_payload_nbytes: int = 64 << 20  # all payloads of one message together
    max_payloads: int = 16


class FrameRejected(Exception):
    """These frames are not a message of ours; `kind` is the name under which it is counted."""

    def __init__(self, kind: str, detail: str = "", message: str = "", source: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail, self.message, self.source = detail, message, source  # as far as they are known


def check_instance_id(instance_id: str) -> None:
    """Raises TransportError unless the id is short and safe in file names."""
    if not INSTANCE_ID.fullmatch(instance_id):
        raise TransportError(
            f"instance id {instance_id!r} cannot be used: give 1 to 100 letters, digits, "
            "'.', '_' or '-', beginning with a letter or digit"
        )


def pack(source: Address, target_epoch: int, message: Any) -> bytes:
    return encode(
        Envelope(PROTOCOL_VERSION, source.instance_id, source.epoch, message, target_epoch)
    )


def frames_of(
    source: Address,
    target_epoch: int,
    message: Message,
    payloads: Sequence[Buffer],
    limits: FrameLimits,
) -> tuple[bytes, int]:
    """Header frame, and the bytes of all payloads.  Raises Unsendable."""
    try:
        header = pack(source, target_epoch, message)
        return header, weigh(header, payloads, limits)
    except (FrameRejected, TypeError, ValueError, OverflowError) as error:
        raise Unsendable(f"{type(message).__name__} cannot be sent: {error}") from None


def weigh(header: bytes, payloads: Sequence[Buffer], limits: FrameLimits) -> int:
    """Bytes of all payloads.  Raises FrameRejected when the receiver would refuse the message."""
    if len(header) > limits.max_header_nbytes:
        raise FrameRejected("oversized_header", f"{len(header)} bytes")
    if not payloads:
        return 0
    if len(payloads) > limits.max_payloads:
        raise FrameRejected("too_many_frames", f"{len(payloads)} payloads")
    nbytes = sum(memoryview(payload).nbytes for payload in payloads)
    if nbytes > limits.max_payload_nbytes:
        raise FrameRejected("oversized_payload", f"{nbytes} bytes")
    return nbytes


def unpack(
    header: Buffer, payloads: tuple[Any, ...], own_epoch: int, limits: FrameLimits
) -> Received:
    """Frames to message.  Raises FrameRejected, whatever the bytes are."""
    if payloads or len(header) > limits.max_header_nbytes:
        weigh(header, payloads, limits)
    try:
        envelope = decode(header)
    except Exception as error:  # msgspec errors, but also RecursionError on deep nesting
        message, who = _named(header)
        kind = f"malformed {message}" if message else "malformed"
        raise FrameRejected(kind, str(error)[:200], message, who) from None
    source, epoch, target_epoch = envelope.source, envelope.epoch, envelope.target_epoch
    if envelope.version != PROTOCOL_VERSION:
        raise FrameRejected("version", f"{envelope.version} instead of {PROTOCOL_VERSION}")
    if target_epoch and target_epoch != own_epoch:
        raise FrameRejected("stale_target", f"meant for epoch {target_epoch}")
    return Received(source, epoch, envelope.message, payloads)


def _named(header: Buffer) -> tuple[str, str]:
    """Type and source of what does not decode, as far as they can be read."""
    if len(header) > MAX_TOLD_NBYTES:
        return "", ""
    try:
        _, source, _, (tag, *_), *_ = msgspec.msgpack.decode(header)
        return (tag if tag in NAMES else ""), str(source)[:100]
    except Exception:
        return "", ""
