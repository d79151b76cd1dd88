"""Registered memory cut into slots, and the arithmetic of writing into them.

`SlotRegion` is what every host-memory backend hands out: one block of memory that is never moved,
seen as `num_slots` slots.  Besides bytes it can hold *deposits*: buffers of a producer in the same
process, kept by reference until the lease ends (`forget`) or their slots are written again.  `plan`
turns "these buffers, into those slots" into copies; it checks everything before the first byte
moves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from epd.messages import RemoteRegion
from epd.shares import neighbours
from epd.transport.base import Buffer, Life, Reference, TransportError

RegionKey = tuple[str, int, str]  # instance id, epoch, region id

Piece = tuple[int, memoryview]  # offset in the target region, bytes to put there


class WriteRefused(TransportError):
    """This write cannot be done and no byte of it has moved; the text has the reason."""


def key_of(remote: RemoteRegion) -> RegionKey:
    return (remote.instance_id, remote.epoch, remote.region_id)


def check_shape(name: str, num_slots: int, slot_nbytes: int) -> int:
    """Bytes of a region.  Raises TransportError for an empty one."""
    if num_slots < 1 or slot_nbytes < 1:
        raise TransportError(
            f"region {name!r} would have {num_slots} slots of {slot_nbytes} bytes: "
            "both must be at least 1"
        )
    return num_slots * slot_nbytes


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Buffers as flat bytes, empty ones left out.  Raises WriteRefused if not contiguous."""
    try:
        views = [memoryview(buffer) for buffer in buffers]
        return [view.cast("B") for view in views if view.nbytes]
    except TypeError as error:
        raise WriteRefused(f"a source buffer is not contiguous bytes: {error}") from None


def runs(slots: Sequence[int], slot_nbytes: int, nbytes: int) -> list[tuple[int, int]]:
    """`(offset, length)` in the region of the first `nbytes` of `slots`; neighbours are merged."""
    slots = slots[: -(-nbytes // slot_nbytes)]
    # As most are; to look at each of a prompt's thousand took longer than to queue the copies.
    if slots and tuple(slots) == tuple(range(slots[0], slots[0] + len(slots))):
        return [(slots[0] * slot_nbytes, nbytes)]
    merged: list[tuple[int, int]] = []
    for first, end in neighbours(slots):
        length = min(nbytes, (end - first) * slot_nbytes)
        merged.append((first * slot_nbytes, length))
        nbytes -= length
    return merged


def plan(source: Sequence[memoryview], target: RemoteRegion, slots: Sequence[int]) -> list[Piece]:
    """Copies that put `source`, concatenated, into `slots`.  Raises WriteRefused."""
    nbytes = sum(view.nbytes for view in source)
    check_fit(nbytes, target, slots)
    places = runs(slots, target.slot_nbytes, nbytes)
    if len(source) == len(places) == 1:  # most rows: one buffer, into slots side by side
        return [(places[0][0], source[0])]
    pieces: list[Piece] = []
    remaining = iter(source)
    view = memoryview(b"")
    for offset, length in places:
        while length:
            if not view.nbytes:
                view = next(remaining)
            step = min(length, view.nbytes)
            pieces.append((offset, view[:step]))
            view, offset, length = view[step:], offset + step, length - step
    return pieces


def check_fit(nbytes: int, target: RemoteRegion, slots: Sequence[int]) -> None:
    """Raises WriteRefused unless the slots are of the region, and hold so much."""
    check_slots(target, slots)
    if nbytes > len(slots) * target.slot_nbytes:
        raise WriteRefused(
            f"{nbytes} bytes do not fit {len(slots)} slots of {target.slot_nbytes} bytes"
        )


def check_slots(target: RemoteRegion, slots: Sequence[int]) -> None:
    """Raises WriteRefused unless the slots are distinct and in the region."""
    if len(slots) > 1 and len(set(slots)) != len(slots):
        raise WriteRefused("a slot is named twice")
    for slot in (min(slots), max(slots)) if slots else ():
        if not 0 <= slot < target.num_slots:
            raise WriteRefused(f"slot {slot} is not one of the region's {target.num_slots}")


def cut(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes `[start, stop)` of the concatenated buffers, as views."""
    views: list[memoryview] = []
    at = 0
    for buffer in buffers:
        lower, upper = max(start - at, 0), min(stop - at, buffer.nbytes)
        if lower < upper:
            views.append(buffer[lower:upper])
        at += buffer.nbytes
    return views


def only_reference(source: Sequence[Buffer]) -> Reference | None:
    """What is handed on as it is, if the source is that."""
    return source[0] if len(source) == 1 and isinstance(source[0], Reference) else None


RECUT = "-cut"  # behind the name of a region whose slots are cut into parts


def recut(region: SlotRegion, num_parts: int) -> SlotRegion:
    """The same memory, where each slot is so many."""
    its = region.remote
    remote = msgspec.structs.replace(
        its,
        region_id=its.region_id + RECUT,
        slot_nbytes=its.slot_nbytes // num_parts,
        num_slots=its.num_slots * num_parts,
    )
    return SlotRegion(remote, region.buffer, by_reference=False).cut_of(region, num_parts)


class RegionIds:
    """Ids of one life's regions, each used once.

    A write that is still on its way to a revoked region must not fit the next one of that name.
    """

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def new(self, name: str) -> str:
        """The name, and from its second use on a number behind it."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}.{self._uses[name]}"


class _Deposit:
    """Buffers, or one `Reference`, kept for the slots of one write."""

    def __init__(self, slots: tuple[int, ...], buffers: Sequence[Any]) -> None:
        self.slots = slots
        self.buffers = buffers
        self.nbytes = sum(buffer.nbytes for buffer in buffers)


class Inbox(Protocol):
    """What a backend brings for a region without touching its memory, until somebody looks."""

    def take_in(self, region: SlotRegion) -> None:
        """`SlotRegion.bring` what has arrived."""


class Lent:
    """Who may write to which slots now; `None`: nobody has begun to lend."""

    def __init__(self) -> None:
        self._to: dict[int, tuple[Life, str]] | None = None
        self._of: dict[str, dict[int, None]] = {}  # by room: slots that were lent to it

    def guard(self) -> None:
        """From now on nobody may, but to whom slots are lent."""
        self._to = self._to or {}

    def lend(self, peer: Life, room: str, slots: Iterable[int]) -> None:
        if self._to is not None:
            self._to.update(dict.fromkeys(slots, (peer, room)))
            self._of.setdefault(room, {}).update(dict.fromkeys(slots))

    def take_back(self, room: str) -> None:
        """Slots that have been lent to another room since are that one's."""
        slots = self._of.pop(room, ())
        if self._to is not None:
            for slot in slots:
                if self._to.get(slot, (None, ""))[1] == room:
                    del self._to[slot]

    def check(self, writer: Life, slots: Iterable[int]) -> None:
        """Raises WriteRefused where one is not lent to the writer, or to its group."""
        if self._to is None:
            return
        lives = (writer, (writer[0].rpartition(".")[0], writer[1]))
        for slot in slots:
            lent = self._to.get(slot)
            if lent is None or lent[0] not in lives:
                raise WriteRefused(f"slot {slot} is not lent to {writer[0]}")


class SlotRegion:
    """One region; `memory` is `num_slots * slot_nbytes` writable bytes."""

    def __init__(self, remote: RemoteRegion, memory: memoryview, *, by_reference: bool) -> None:
        self.remote = remote
        self.by_reference = by_reference
        self.revoked = False
        self._memory = memory
        self.inboxes: list[Inbox] = []
        self._deposits: dict[int, _Deposit] = {}  # by each of its slots
        self.lent = Lent()
        self._num_parts = 1  # of a slot that is lent

    def check_writer(self, writer: Life, slots: Sequence[int]) -> None:
        """Raises WriteRefused unless these are lent to it."""
        self.lent.check(writer, {slot // self._num_parts for slot in slots})

    def cut_of(self, region: SlotRegion, num_parts: int) -> SlotRegion:
        """It is that memory in finer slots, and lent with it."""
        self.lent, self._num_parts = region.lent, num_parts
        return self

    @property
    def buffer(self) -> memoryview:
        """The whole memory, writable, with all that has arrived; deposits are not in it."""
        self._take_in()
        return self._memory

    def _take_in(self) -> None:
        if not self.revoked:
            for inbox in self.inboxes:
                inbox.take_in(self)

    def views(self, slots: Sequence[int], nbytes: int) -> list[Any]:
        """The first `nbytes` of what was written to `slots`, in order; no copy.

        A view per slot, or for slots that hold exactly one deposit what was given, as it was given.
        Raises WriteRefused when the slots are not in the region or hold less.
        """
        self._take_in()
        check_slots(self.remote, slots)
        if nbytes > len(slots) * self.remote.slot_nbytes:
            raise WriteRefused(f"{nbytes} bytes asked of {len(slots)} slots")
        if not self._deposits:
            return self._written(slots, nbytes)
        deposit = self._deposits.get(slots[0]) if slots else None
        if deposit is not None and deposit.slots == tuple(slots):
            if deposit.nbytes == nbytes:
                return list(deposit.buffers)
            views = cut(deposit.buffers, 0, nbytes)
        else:
            views = [view for slot in slots for view in self._slot_views(slot)]
            views = cut(views, 0, nbytes)
        if sum(view.nbytes for view in views) < nbytes:
            raise WriteRefused(f"fewer than {nbytes} bytes were deposited in slots {list(slots)}")
        return views

    def _written(self, slots: Sequence[int], nbytes: int) -> list[memoryview]:
        """Of slots that hold bytes and no deposit."""
        step = self.remote.slot_nbytes
        starts = [slot * step for slot in slots[: -(-nbytes // step)]]
        views = [self._memory[start : start + step] for start in starts]
        if nbytes % step:
            views[-1] = views[-1][: nbytes % step]
        return views

    def check_write(
        self, slot_nbytes: int, num_slots: int, slots: Sequence[int], nbytes: int
    ) -> None:
        """What a writer asks for fits what is here.  Raises WriteRefused."""
        if (self.remote.slot_nbytes, self.remote.num_slots) != (slot_nbytes, num_slots):
            raise WriteRefused(f"region {self.remote.region_id!r} has another shape than described")
        check_slots(self.remote, slots)
        if not 0 <= nbytes <= len(slots) * slot_nbytes:
            raise WriteRefused(f"{nbytes} bytes do not fit {len(slots)} slots")

    def deposit(self, slots: Sequence[int], buffers: Sequence[memoryview | Reference]) -> None:
        """Keep a producer's buffers for `slots` instead of their bytes."""
        self._take_in()
        self._lay(slots, buffers)

    def bring(self, slots: Sequence[int], payload: memoryview) -> None:
        """What an inbox has for `slots`: kept as it is, or copied where memory is what counts."""
        if self.by_reference:
            self._lay(slots, [payload])
            return
        with contextlib.suppress(WriteRefused):  # what fits nowhere is nobody's
            for offset, piece in plan([payload], self.remote, slots):
                self._memory[offset : offset + piece.nbytes] = piece

    def _lay(self, slots: Sequence[int], buffers: Sequence[memoryview | Reference]) -> None:
        self._drop(slots)
        deposit = _Deposit(tuple(slots), buffers)
        for slot in slots:
            self._deposits[slot] = deposit

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the deposits that touch these slots."""
        self._take_in()
        self._drop(slots)

    def _drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            deposit = self._deposits.get(slot)
            for touched in deposit.slots if deposit else ():
                self._deposits.pop(touched, None)

    def release(self) -> None:
        """Revoked: drop every reference.  Views that are out stay valid until dropped."""
        self.revoked = True
        self._deposits.clear()
        self._memory = memoryview(b"")

    def _slot_views(self, slot: int) -> list[memoryview]:
        slot_nbytes = self.remote.slot_nbytes
        deposit = self._deposits.get(slot)
        if deposit is None:
            return [self._memory[slot * slot_nbytes : (slot + 1) * slot_nbytes]]
        start = deposit.slots.index(slot) * slot_nbytes
        return cut(deposit.buffers, start, start + slot_nbytes)
