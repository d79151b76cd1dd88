"""The control plane's vocabulary for transfers, on both hops: what the ends of a room say.

A consumer leases memory and grants it; a producer writes, and commits.  `epd.fsm.room` has the
theory.
"""

from __future__ import annotations

from epd.failure import Failure
from epd.layouts import KvLayout
from epd.records import (
    Address,
    KvState,
    MediaItem,
    RemoteRegion,
    RowContract,
    SamplingParams,
)
from epd.wire import Message


class KvOffer(Message):
    """Prefill asks decode for room: blocks for the prompt now and `max_tokens` to come."""

    room: str
    request_id: str
    attempt: int
    num_prompt_tokens: int
    num_emitted: int
    token_ids: tuple[int, ...]  # penalties and later recompute need the text
    sampling: SamplingParams
    layout: KvLayout
    gateway: Address
    deadline_s: float
    items: tuple[MediaItem, ...] = ()  # where images stand: part of what a block's content is
    reports: bool = False  # the client wants a timeline
    scope: str = ""  # as in PrefillRequest
    first_token_deadline_s: float = 0.0
    is_suspect: bool = False


class Grant(Message):
    """The consumer leased `slots` of `region` for this room: the producer may write; idempotent.

    Of a group the region is that of the first rank; each has the same slots in its own.
    """

    room: str
    attempt: int
    mm_hash: str  # empty for KV
    region: RemoteRegion
    slots: tuple[int, ...]
    contract: RowContract | None  # rows; None for KV, whose layout is checked at the offer
    num_rows: int
    deadline_s: float
    num_held: int = 0  # slots' worth of KV that the consumer has: `slots` are for what is behind
    parts: tuple[RemoteRegion, ...] = ()  # the region at the other ranks, in their order
    layout: KvLayout | None = None  # of KV: which heads each rank has
    is_sharded: bool = False  # of rows at several ranks: each gets its part, and not all of them

    @property
    def slot_nbytes(self) -> int:
        """What a slot holds at all ranks together; heads that several have count once."""
        return self.region.slot_nbytes if self.layout is None else self.layout.whole.slot_nbytes


class Commit(Message):
    """Every byte of the room has landed; repeated until acknowledged."""

    room: str
    attempt: int
    nbytes: int
    parts: tuple[tuple[int, int], ...]  # of each write: bytes, and their checksum; 0: not computed
    kv: KvState | None = None


class CommitAck(Message):
    room: str
    attempt: int


class CancelTransfer(Message):
    """The consumer does not want it any more; its slots stay leased until CancelAck (fault F7).

    `failure`: where it never wanted it.  It goes the way of the offer, so that who learns of the
    refusal learns why.
    """

    room: str
    attempt: int
    failure: Failure | None = None


class CancelAck(Message):
    """The producer will never write to this room's slots again."""

    room: str
    attempt: int


class TransferAborted(Message):
    """The producer failed; nothing is being written and nothing will be."""

    room: str
    attempt: int
    failure: Failure


class TransferInDoubt(Message):
    """The producer failed and cannot tell yet whether bytes still land: an end follows later."""

    room: str
    attempt: int
    reason: str
