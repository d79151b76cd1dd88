"""The two ends of a ZMQ connection: frames into messages, messages into a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from epd.messages import Address
from epd.transport.base import Buffer
from epd.transport.codec import FrameLimits, FrameRejected

ZERO_COPY_NBYTES = 64 << 10  # below this a copy is cheaper than libzmq's call back to free it


class MessageReader:
    """Puts the ROUTER's frames together; of a message that breaks a limit it keeps nothing."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        self._frames: list[zmq.Frame] = []
        self._nbytes = 0
        self._broken = ""  # the limit that the message under way has broken

    def add(self, frame: zmq.Frame) -> tuple[memoryview, tuple[Any, ...]] | None:
        """Header and payloads once the last frame is here, else None.

        Raises FrameRejected at the last frame of a message that cannot be one of ours.
        """
        if not self._broken:
            self._frames.append(frame)
            self._nbytes += len(frame)
            self._broken = self._breach()
        if self._broken:
            self._frames = []
        if frame.more:
            return None
        frames, broken = self._frames, self._broken
        self.reset()
        if broken:
            raise FrameRejected(broken)
        if len(frames) < 2:
            raise FrameRejected("too_few_frames", f"{len(frames)}")
        payloads = tuple(_payload(frame) for frame in frames[2:])
        return frames[1].buffer, payloads

    def _breach(self) -> str:
        if len(self._frames) > 2 + self._limits.max_payloads:
            return "too_many_frames"
        if self._nbytes > self._limits.max_header_nbytes + self._limits.max_payload_nbytes:
            return "oversized_payload"
        return ""


def _payload(frame: zmq.Frame) -> Any:
    """Big payloads stay where libzmq received them."""
    return frame.bytes if len(frame) < ZERO_COPY_NBYTES else frame.buffer


class Outbox:
    """The DEALER towards one life of one peer."""

    def __init__(self, dealer: zmq.Socket[bytes], peer: Address, max_queued_nbytes: int) -> None:
        self.peer = peer
        self._dealer = dealer
        self._max_queued_nbytes = max_queued_nbytes
        self._big: deque[tuple[zmq.MessageTracker, int]] = deque()  # not yet let go by libzmq
        self._big_nbytes = 0

    def learn(self, peer: Address) -> bool:
        """True if this connection serves `peer` too: the same life, or the first life met of a peer
        that was dialled without an epoch."""
        if self.peer.endpoint != peer.endpoint or self.peer.epoch not in (0, peer.epoch):
            return False
        self.peer = peer
        return True

    def send(self, header: bytes, payloads: Sequence[Buffer], nbytes: int) -> bool:
        """Queue the frames.  False or zmq.Again: the queue is full and nothing was queued."""
        if not payloads:
            self._dealer.send(header, zmq.NOBLOCK)
            return True
        while self._big and self._big[0][0].done:
            self._big_nbytes -= self._big.popleft()[1]
        if self._big and self._big_nbytes + nbytes > self._max_queued_nbytes:
            return False
        views = [memoryview(payload).cast("B") for payload in payloads]
        self._dealer.send(header, zmq.NOBLOCK | zmq.SNDMORE)  # the only frame that can say Again
        for index, view in enumerate(views):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if index + 1 < len(views) else 0)
            if view.nbytes < ZERO_COPY_NBYTES:
                self._dealer.send(view, flags)
                continue
            tracker = self._dealer.send(view, flags, copy=False, track=True)
            self._big.append((tracker, view.nbytes))
            self._big_nbytes += view.nbytes
        return True

    def close(self, linger_ms: int) -> None:
        """Close; what is queued may still leave for `linger_ms`."""
        self._dealer.close(linger=linger_ms)
