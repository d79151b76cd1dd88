"""ENCODING: the making of one `mm_hash`'s rows at an encode instance (single flight).

Theory of operation
-------------------
A hash is decoded and encoded once for all its rooms: they join the machine, and when the rows are
resident each is filled from them (faults F32, F37).  The value is whole: main embedding and
deepstack are one tensor (F12).  An image that cannot be used fails this machine and its rooms,
nothing else (F13).

Rows without a taker have to be kept, so work begins only when its turn comes
(`epd.scheduling.run_ahead`): until then the machine is DEFERRED, and owns a place in that queue.
From then on it owns a share of the encoder's run ahead, which it passes on to the rooms that are
filled: the last one that closes gives it back.  Until it has rows, it also owns a share
of the memory for decoded pixels.

What cannot be interrupted: image decode on the pool, and a batch on the device. If all rooms leave
meanwhile the machine is ABANDONED: it keeps its share, since a room may join before the outcome,
and rows that arrive then stay as cache. Before work has begun (DEFERRED), and before a batch has
taken it (PREPARED), it can simply be dropped.

Rows are kept in tiers: where the tower leaves them (RESIDENT), the host's memory (DEMOTED) and, if
configured, a storage that other encoders read too.  The first is a GPU's memory, or the host's
without one.  The first two are exclusive: DEMOTING and PROMOTING copy off the loop and own both
copies until one is let go.  Readers may come at any time, since the copy that they find is whole.
What readers hold is not moved: a copy that ends while a room reads is dropped.  Storage is asked
first (LOADING), once for all rooms.  What it has lost, or does not answer in time, is encoded anew,
so a read that hangs holds no room up.  Writing to storage is nobody's state: it may fail, and then
the value is encoded again one day.

An instance without a vision tower has machines that cannot encode: what storage does not answer
fails as `absent`, which the gateway takes to an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    Timers,
    unless,
)
from epd.fsm.vision import Image, Patches, Rows
from epd.records import Clip, PixelBounds


class Do(Effect):
    AWAIT_TURN = "wait until work on it would not run too far ahead"
    COUNT_AHEAD = "count its rows among those that are not taken yet"
    LEAVE_AHEAD = "leave that queue, or that count"
    FREE_PIXELS = "give back its share of the memory for decoded pixels"
    START_LOAD = "look for the rows in storage"
    START_PREPROCESS = "decode, resize and patchify on the pool"
    ENQUEUE = "offer the patches to the next batch"
    DEQUEUE = "take the patches out of the queue for batches"
    KEEP_ROWS = "enter the rows into the books of the device tier"
    KEEP_HOST_ROWS = "enter the rows into the books of the host tier"
    STORE_ROWS = "write the rows to storage, if there is one"
    START_DEMOTION = "count the rows in the host tier and copy them there"
    START_PROMOTION = "count the rows in the device tier and copy them there"
    FILL_ROOMS = "tell every room's transfer that its bytes are ready"
    FILL_ONE = "tell the new room's transfer that its bytes are ready"
    FAIL_ROOMS = "tell every room's transfer that its source failed"
    RELEASE_ROWS = "drop the rows and their share of the budget"
    ARM_OUTCOME = "bound the wait for rows, or for the outcome of work that nobody waits for"
    REPORT_HANG = "the device does not answer: say so in health and log"


class Own(Owned):
    TURN = "a place in the queue of work that may not begin yet", Do.LEAVE_AHEAD
    SHARE = "a share of what the encoder may run ahead", Do.LEAVE_AHEAD, Do.FILL_ROOMS
    PIXELS = "a share of the memory for decoded pixels", Do.FREE_PIXELS
    READ = "a thread that reads storage"
    WORK = "a thread or the device that works on it", None, Do.REPORT_HANG
    PATCHES = "patches in the queue for batches", Do.DEQUEUE
    ROWS = "rows in the books of a tier", Do.RELEASE_ROWS
    COPY_DOWN = "a copy in the making, to the host tier"
    COPY_UP = "a copy in the making, to the device tier"


class S(State):
    ABSENT = "nobody has asked"
    DEFERRED = "waits: the encoder would run too far ahead, or hold too many pixels", Own.TURN
    LOADING = "the rows are looked for in storage", Own.SHARE, Own.PIXELS, Own.READ
    QUEUED = "the compressed image is decoded and resized", Own.SHARE, Own.PIXELS, Own.WORK
    PREPARED = "waits for a batch", Own.SHARE, Own.PIXELS, Own.PATCHES
    ENCODING = "in a batch", Own.SHARE, Own.PIXELS, Own.WORK
    RESIDENT = "in the device tier; rooms may read the rows", Own.ROWS
    DEMOTING = "on its way to the host tier; rooms read the rows", Own.ROWS, Own.COPY_DOWN
    DEMOTED = "in the host tier; rooms may read the rows there", Own.ROWS
    PROMOTING = "on its way to the device tier; rooms read the rows", Own.ROWS, Own.COPY_UP
    ABANDONED = "no room is left; the outcome is awaited", Own.SHARE, Own.PIXELS, Own.WORK
    FAILED = "cannot be encoded"
    EVICTED = "rows or patches were dropped"


@dataclass(slots=True)
class Requested(Event):
    room: str
    is_suspect: bool = False  # an instance died of it


@dataclass(slots=True)
class RoomClosed(Event):
    """The room's transfer does not need the rows any more, delivered or not."""

    room: str


@dataclass(slots=True)
class TurnCame(Event):
    """Work on it may begin."""

    brings = (Own.SHARE, Own.PIXELS)
    ends = (Own.TURN,)


@dataclass(slots=True)
class PreprocessSucceeded(Event):
    ends = (Own.WORK,)
    patches: Patches


@dataclass(slots=True)
class PreprocessFailed(Event):
    """The image cannot be used; the reason is for the client."""

    ends = (Own.WORK,)
    reason: str


@dataclass(slots=True)
class PreprocessCrashed(Event):
    """The image need not be at fault: another encoder may take it."""

    ends = (Own.WORK,)
    reason: str


@dataclass(slots=True)
class BatchStarted(Event):
    brings = (Own.WORK,)
    ends = (Own.PATCHES,)


@dataclass(slots=True)
class EncodeSucceeded(Event):
    """The event of the producing stream has passed: rows may be read (fault F2)."""

    ends = (Own.WORK,)
    rows: Rows


@dataclass(slots=True)
class EncodeFailed(Event):
    ends = (Own.WORK,)
    reason: str


@dataclass(slots=True)
class EncodeTimedOut(Event):
    by_time = True


@dataclass(slots=True)
class LoadSucceeded(Event):
    """Storage had the value, whole, and made by this model for this image."""

    ends = (Own.READ,)
    rows: Rows


@dataclass(slots=True)
class LoadMissed(Event):
    """Storage has no such value, or a torn one."""

    ends = (Own.READ,)


@dataclass(slots=True)
class LoadTimedOut(Event):
    """It is not waited for any more."""

    by_time = True
    ends = (Own.READ,)


@dataclass(slots=True)
class DemotionRequested(Event):
    """The device tier needs room."""


@dataclass(slots=True)
class DemotionSucceeded(Event):
    ends = (Own.COPY_DOWN,)
    rows: Rows


@dataclass(slots=True)
class PromotionSucceeded(Event):
    ends = (Own.COPY_UP,)
    rows: Rows


@dataclass(slots=True)
class CopyFailed(Event):
    """Neither tier changed."""

    ends = (Own.COPY_DOWN, Own.COPY_UP)


@dataclass(slots=True)
class CopyTimedOut(Event):
    """It is not waited for any more."""

    by_time = True
    ends = (Own.COPY_DOWN, Own.COPY_UP)


@dataclass(slots=True)
class EvictionRequested(Event):
    pass


@dataclass(slots=True)
class IdleTimePassed(Event):
    by_time = True


def others_wait(encoding: Encoding, event: RoomClosed) -> bool:
    return any(room != event.room for room in encoding.rooms)


def in_batch(encoding: Encoding, event: Event) -> bool:
    return encoding.in_batch


def may_be_stored(encoding: Encoding, event: Event) -> bool:
    return encoding.stored


def is_made(encoding: Encoding, event: Event) -> bool:
    return bool(encoding.rooms) and encoding.encodes


def unreferenced(encoding: Encoding, event: Event) -> bool:
    return not encoding.rooms


def add_room(encoding: Encoding, event: Requested) -> None:
    encoding.rooms[event.room] = None
    encoding.is_suspect = encoding.is_suspect or event.is_suspect


def remove_room(encoding: Encoding, event: RoomClosed) -> None:
    encoding.rooms.pop(event.room, None)


def keep_patches(encoding: Encoding, event: PreprocessSucceeded) -> None:
    encoding.image, encoding.patches = None, event.patches


def enter_batch(encoding: Encoding, event: BatchStarted) -> None:
    encoding.in_batch = True


def keep_rows(encoding: Encoding, event: EncodeSucceeded) -> None:
    encoding.patches, encoding.rows, encoding.in_batch = None, event.rows, False


def keep_loaded(encoding: Encoding, event: LoadSucceeded) -> None:
    encoding.image, encoding.rows = None, event.rows


def keep_copy(encoding: Encoding, event: DemotionSucceeded | PromotionSucceeded) -> None:
    encoding.rows = event.rows


def note_absent(encoding: Encoding, event: Event) -> None:
    reason = "the rows of an image are not in the shared storage"
    encoding.image, encoding.failure = None, Failure(FailureKind.ABSENT, reason)


def note_bad_image(encoding: Encoding, event: PreprocessFailed) -> None:
    encoding.image, encoding.failure = None, Failure(FailureKind.MEDIA, event.reason)


def note_failure(encoding: Encoding, event: EncodeFailed | PreprocessCrashed) -> None:
    encoding.image, encoding.patches, encoding.in_batch = None, None, False
    encoding.failure = Failure(FailureKind.ENGINE, event.reason)


def note_timeout(encoding: Encoding, event: EncodeTimedOut) -> None:
    encoding.failure = Failure(FailureKind.ENGINE, "the encoder did not answer in time")


def drop_rows(encoding: Encoding, event: Event) -> None:
    encoding.rows = None


def drop_patches(encoding: Encoding, event: RoomClosed) -> None:
    remove_room(encoding, event)
    encoding.patches = None


_AT_REST = (S.RESIDENT, S.DEMOTED)
_CACHED = (*_AT_REST, S.DEMOTING, S.PROMOTING)
_ENDED = (S.FAILED, S.EVICTED)
_AT_WORK = (S.QUEUED, S.ENCODING)
_IN_THE_MAKING = (*_AT_WORK, S.PREPARED)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.ABSENT, Requested, S.DEFERRED, (Do.AWAIT_TURN, Do.ARM_OUTCOME), add_room),
    Row(S.ABSENT, IdleTimePassed, S.EVICTED),
    Row((S.DEFERRED, S.LOADING, *_IN_THE_MAKING), Requested, None, (), add_room, note="single flight (F37)"),
    # May it begin?
    Row(S.DEFERRED, TurnCame, S.LOADING, (Do.START_LOAD,), when=may_be_stored),
    Row(S.DEFERRED, TurnCame, S.QUEUED, (Do.START_PREPROCESS,), when=unless(may_be_stored)),
    Row(_ENDED, TurnCame, None, note="it has left in the same moment"),
    # Is it in storage?
    Row(S.LOADING, LoadSucceeded, S.DEMOTED, (Do.KEEP_HOST_ROWS,), keep_loaded, unreferenced, "nobody waits any more: kept as cache (F21)"),
    Row(S.LOADING, LoadSucceeded, S.DEMOTED, (Do.KEEP_HOST_ROWS, Do.FILL_ROOMS), keep_loaded, unless(unreferenced)),
    Row(S.LOADING, (LoadMissed, LoadTimedOut), S.QUEUED, (Do.START_PREPROCESS, Do.ARM_OUTCOME), when=is_made, note="a storage that hangs holds nobody up"),
    Row(S.LOADING, (LoadMissed, LoadTimedOut), S.FAILED, (Do.FAIL_ROOMS,), note_absent, unless(is_made), "nobody waits, or nobody can make them here"),
    # Make it.
    Row(S.QUEUED, PreprocessSucceeded, S.PREPARED, (Do.ENQUEUE,), keep_patches),
    Row(S.QUEUED, PreprocessFailed, S.FAILED, (Do.FAIL_ROOMS,), note_bad_image, note="fails alone (F13)"),
    Row(S.PREPARED, BatchStarted, S.ENCODING, (), enter_batch),
    Row(S.ENCODING, EncodeSucceeded, S.RESIDENT, (Do.KEEP_ROWS, Do.STORE_ROWS, Do.FILL_ROOMS), keep_rows),
    Row(S.PREPARED, EncodeFailed, S.FAILED, (Do.FAIL_ROOMS,), note_failure, note="no batch can be planned with it; the others go on"),
    Row(S.QUEUED, PreprocessCrashed, S.FAILED, (Do.FAIL_ROOMS,), note_failure, note="not the image's fault: another encoder may do it"),
    Row(S.ENCODING, EncodeFailed, S.FAILED, (Do.FAIL_ROOMS,), note_failure, note="likewise"),
    Row(_AT_WORK, EncodeTimedOut, S.ABANDONED, (Do.FAIL_ROOMS, Do.ARM_OUTCOME), note_timeout),
    Row((S.DEFERRED, S.PREPARED), EncodeTimedOut, S.FAILED, (Do.FAIL_ROOMS,), note_timeout),
    Row((S.DEFERRED, *_IN_THE_MAKING, *_CACHED), RoomClosed, None, (), remove_room, others_wait),
    Row(_AT_WORK, RoomClosed, S.ABANDONED, (), remove_room, unless(others_wait), "a pool thread owns the image, the device the patches"),
    Row((S.DEFERRED, S.PREPARED), RoomClosed, S.EVICTED, (), drop_patches, unless(others_wait)),
    Row(S.DEMOTED, RoomClosed, S.PROMOTING, (Do.START_PROMOTION, Do.LEAVE_AHEAD), remove_room, unless(others_wait), "it was of use again"),
    Row((S.RESIDENT, S.DEMOTING, S.PROMOTING), RoomClosed, None, (Do.LEAVE_AHEAD,), remove_room, unless(others_wait)),
    Row((S.LOADING, S.ABANDONED), RoomClosed, None, (), remove_room),
    # Nobody waits for it.
    Row(S.ABANDONED, Requested, S.ENCODING, (), add_room, in_batch, "resurrection (F22)"),
    Row(S.ABANDONED, Requested, S.QUEUED, (), add_room, unless(in_batch), "resurrection (F22)"),
    Row(S.ABANDONED, PreprocessSucceeded, S.EVICTED),
    Row(S.ABANDONED, PreprocessFailed, S.FAILED, (), note_bad_image),
    Row(S.ABANDONED, EncodeSucceeded, S.RESIDENT, (Do.KEEP_ROWS, Do.STORE_ROWS), keep_rows, note="kept as cache (F21)"),
    Row(S.ABANDONED, (PreprocessCrashed, EncodeFailed), S.FAILED, (), note_failure),
    Row(S.ABANDONED, EncodeTimedOut, S.FAILED, (Do.REPORT_HANG,), note_timeout),
    # Keep it.
    Row(_CACHED, Requested, None, (Do.COUNT_AHEAD, Do.FILL_ONE), add_room),
    Row(S.RESIDENT, DemotionRequested, S.DEMOTING, (Do.START_DEMOTION,), when=unreferenced),
    Row(S.RESIDENT, DemotionRequested, None, when=unless(unreferenced), note="not what is still to be sent (F31)"),
    Row(S.DEMOTING, DemotionSucceeded, S.DEMOTED, (Do.KEEP_HOST_ROWS,), keep_copy, unreferenced),
    Row(S.DEMOTING, DemotionSucceeded, S.RESIDENT, (Do.KEEP_ROWS,), when=unless(unreferenced), note="wanted meanwhile: the copy is let go"),
    Row(S.DEMOTING, (CopyFailed, CopyTimedOut), S.RESIDENT, (Do.KEEP_ROWS,)),
    Row(S.PROMOTING, PromotionSucceeded, S.RESIDENT, (Do.KEEP_ROWS,), keep_copy, unreferenced),
    Row(S.PROMOTING, PromotionSucceeded, S.DEMOTED, (Do.KEEP_HOST_ROWS,), when=unless(unreferenced), note="read here meanwhile: the copy is let go"),
    Row(S.PROMOTING, (CopyFailed, CopyTimedOut), S.DEMOTED, (Do.KEEP_HOST_ROWS,)),
    Row(_AT_REST, (EvictionRequested, IdleTimePassed), S.EVICTED, (), drop_rows, unreferenced),
    Row(_AT_REST, (EvictionRequested, IdleTimePassed), None, when=unless(unreferenced), note="not what is still to be sent (F31)"),
)

_COPIES = (DemotionSucceeded, PromotionSucceeded, CopyFailed)

IGNORES = (
    Ignore(_ENDED, (RoomClosed, PreprocessSucceeded, PreprocessFailed, PreprocessCrashed, EncodeSucceeded, EncodeFailed, LoadSucceeded, LoadMissed, DemotionRequested, *_COPIES, EvictionRequested, IdleTimePassed), "it has ended; a late outcome is dropped with what it carries"),
    Ignore((*_IN_THE_MAKING, S.ABANDONED, *_CACHED), (LoadSucceeded, LoadMissed), "storage answers late: it was not waited for"),
    Ignore((S.DEFERRED, S.LOADING, *_IN_THE_MAKING, S.ABANDONED), (DemotionRequested, EvictionRequested, IdleTimePassed), "nothing to evict yet"),
    Ignore((S.DEMOTING, S.PROMOTING), (DemotionRequested, EvictionRequested, IdleTimePassed), "on its way already"),
    Ignore((S.DEMOTED,), (DemotionRequested,), "it is there already"),
    Ignore(_AT_REST, _COPIES, "the late end of a copy that was given up"),
    Ignore((S.DEMOTING,), (PromotionSucceeded,), "the late end of a copy that was given up"),
    Ignore((S.PROMOTING,), (DemotionSucceeded,), "the late end of a copy that was given up"),
)

_TIMERS: Timers = {
    LoadTimedOut: (Do.START_LOAD,),
    EncodeTimedOut: (Do.ARM_OUTCOME,),
    CopyTimedOut: (Do.START_DEMOTION, Do.START_PROMOTION),
}
TABLE = Table("ENCODING", __doc__ or "", S, S.ABSENT, _ENDED, ROWS, IGNORES, timers=_TIMERS)
# fmt: on


class Encoding(Machine):
    """One hash; `rooms` are its open rooms, which hold references to the rows."""

    table = TABLE
    __slots__ = (
        "adapter", "arrival", "bounds", "clip", "encodes", "expected", "failure", "image", "in_batch",
        "is_suspect", "num_rows", "patches", "pixels_nbytes", "rooms", "rows", "stored",
    )  # fmt: skip

    def __init__(
        self,
        mm_hash: str,
        image: Image,
        expected: tuple[int, int, int],
        journal: Journal = NULL_JOURNAL,
        *,
        num_rows: int = 0,
        pixels_nbytes: int = 0,
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        adapter: str = "",
        arrival: int = 0,
        stored: bool = False,
        encodes: bool = True,
    ) -> None:
        super().__init__(mm_hash, journal)
        self.arrival = arrival  # its place among the encodings of its instance
        self.image: Image | None = image
        self.expected = expected  # grid_thw that the gateway computed
        self.num_rows = num_rows
        self.pixels_nbytes = pixels_nbytes  # that are held until it has rows
        self.clip = clip  # which frames to take of a video; None: an image
        self.bounds = bounds  # between which areas an image is resized; None: the model's
        self.adapter = adapter  # digest of the one that changes the tower for it; empty: none
        self.stored = stored  # whether a storage may know its rows
        self.encodes = encodes  # False: rows can only be found in storage
        self.rooms: dict[str, None] = {}
        self.patches: Patches | None = None
        self.rows: Rows | None = None
        self.in_batch = False
        self.is_suspect = False
        self.failure: Failure | None = None

    @property
    def at_rest(self) -> bool:
        """Cached: nothing is on its way."""
        return self.state in (S.RESIDENT, S.DEMOTED)
