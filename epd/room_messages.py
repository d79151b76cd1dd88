"""The control plane's vocabulary for transfers, on both hops: messages of the ends of a room.

A consumer leases memory and grants it; a producer writes and commits (theory: `epd.fsm.room`)."""

from __future__ import annotations

from epd.failure import Failure
from epd.layouts import KvLayout
from epd.ranges import Checksum, Count, Hash, Id, Index, NumBytes, Positive, Seconds, TokenId, Where
from epd.records import (
    Address,
    KvState,
    MediaItem,
    RemoteRegion,
    RowContract,
    SamplingParams,
    check_prompt,
)
from epd.wire import Message


class KvOffer(Message):
    """Prefill asks decode for room: blocks for the prompt now and `max_tokens` to come."""

    room: Id
    request_id: Id
    attempt: Count
    num_prompt_tokens: Positive
    num_emitted: Count
    token_ids: tuple[TokenId, ...]  # penalties and later recompute need the text
    sampling: SamplingParams
    layout: KvLayout
    gateway: Address
    deadline_s: Seconds
    items: tuple[MediaItem, ...] = ()  # where images stand: part of what a block's content is
    reports: bool = False  # the client wants a timeline
    scope: Where = ""  # as in PrefillRequest
    first_token_deadline_s: Seconds = 0.0
    is_suspect: bool = False
    adapter: Hash = ""  # as in PrefillRequest

    def __post_init__(self) -> None:
        check_prompt(self.token_ids, self.num_emitted, self.items)
        if self.num_prompt_tokens != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} ids of {self.num_prompt_tokens} tokens")


class MoveRequest(Message):
    """An attempt is to inherit what the former one decodes here, and to send its KV to who goes on,
    as a prefill instance does.  Answered by the RequestFailed of that attempt if it cannot."""

    request_id: Id
    attempt: Count
    former: Count  # the attempt that it decodes
    decode: Address
    first_token_deadline_s: Seconds


class Grant(Message):
    """The consumer leased `slots` of `region` for this room: the producer may write; idempotent.

    Of a group the region is that of the first rank; each has the same slots in its own.
    """

    room: Id
    attempt: Count
    mm_hash: Hash  # empty for KV
    region: RemoteRegion
    slots: tuple[Index, ...]
    contract: RowContract | None  # rows; None for KV, whose layout is checked at the offer
    num_rows: Count
    deadline_s: Seconds  # in the time of this gateway, whose request it is of
    gateway: Id
    num_held: Count = 0  # slots' worth of KV that the consumer has: `slots` are for what is behind
    parts: tuple[RemoteRegion, ...] = ()  # the region at the other ranks, in their order
    layout: KvLayout | None = None  # of KV: which heads each rank has
    is_sharded: bool = False  # of rows at several ranks: each gets its part, and not all of them
    held: tuple[Index, ...] = ()  # with a window: places in a table that it has, `num_held` of them

    def __post_init__(self) -> None:
        if self.slots and max(self.slots) >= self.region.num_slots:
            raise ValueError(f"slot {max(self.slots)} is not one of {self.region.num_slots}")
        if self.layout is not None and len(self.layout.shares) != 1 + len(self.parts):
            raise ValueError(f"{1 + len(self.parts)} regions of {len(self.layout.shares)} ranks")
        if self.held and len(self.held) != self.num_held:
            raise ValueError(f"{len(self.held)} places of {self.num_held} that are held")

    @property
    def slot_nbytes(self) -> int:
        """What a slot holds at all ranks together; heads that several have count once."""
        return self.region.slot_nbytes if self.layout is None else self.layout.whole.slot_nbytes


class Commit(Message):
    """Every byte of the room has landed; repeated until acknowledged."""

    room: Id
    attempt: Count
    nbytes: NumBytes
    # Of each write: bytes, and their checksum; 0: not computed.
    parts: tuple[tuple[NumBytes, Checksum], ...]
    kv: KvState | None = None


class CommitAck(Message):
    room: Id
    attempt: Count


class CancelTransfer(Message):
    """The consumer has no use for it any more; its slots stay leased until CancelAck (fault F7).

    `failure`: where it never had.  It goes the way of the offer, so that who learns of the refusal
    learns why."""

    room: Id
    attempt: Count
    failure: Failure | None = None


class CancelAck(Message):
    """The producer will never write to this room's slots again."""

    room: Id
    attempt: Count


class TransferAborted(Message):
    """The producer failed; nothing is being written and nothing will be."""

    room: Id
    attempt: Count
    failure: Failure


class TransferInDoubt(Message):
    """The producer failed, and bytes may still land: an end follows later."""

    room: Id
    attempt: Count
    reason: str
