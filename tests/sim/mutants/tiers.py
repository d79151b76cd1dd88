"""Bugs of an encoder's memory, put back (see `__init__.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from epd.engine.base import Rows
from epd.failure import Failure, FailureKind
from epd.fsm import encoding, outgoing
from epd.fsm.kernel import Event
from epd.fsm.outgoing import Outgoing
from epd.messages import Grant, InstanceInfo
from epd.roles.encode.role import EncodeRole
from epd.roles.encode.row_producer import RowProducer
from epd.roles.encode.row_tiers import RowTiers
from epd.roles.encode.send_ring import SendRing
from epd.roles.gateway import dispatch
from epd.roles.outgoing import OutgoingRooms, Staged
from epd.scheduling import placement
from epd.transport.base import Buffer, Received
from epd.transport.files import whole_file
from epd_lab.sim.engine.engines import SimVisionEngine
from epd_lab.sim.planes.storage import SimStorage
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

ENCODING = encoding.Encoding.table
S = encoding.S


@mutant
def a_copy_is_half_a_value() -> Planted:
    """F12: a tier keeps the main embedding and forgets the levels beside it."""
    to_host = SimVisionEngine.to_host

    async def half(self: SimVisionEngine, rows: Rows) -> Rows:
        whole = await to_host(self, rows)
        content, width = bytearray(whole.buffer()), self.contract.row_nbytes
        for start in range(0, len(content), width):
            content[start + width // 2 : start + width] = bytes(width // 2)
        return Rows(bytes(content), whole.num_rows, whole.nbytes)

    return patched(SimVisionEngine, "to_host", half)


@mutant
def each_reader_loads_for_itself() -> Planted:
    """F37: a request that finds a load under way starts another one."""
    on_request = EncodeRole.on_encode_request

    def not_joined(self: EncodeRole, received: Received) -> None:
        known = self.encodings.get(received.message.mm_hash)
        if known is not None and known.state is S.LOADING:
            del self.encodings[received.message.mm_hash]
        on_request(self, received)

    return patched(EncodeRole, "on_encode_request", not_joined)


@mutant
def torn_files_are_believed() -> Planted:
    """F32: what a file holds is taken for what was written; a short one is filled up."""
    note_of = re.compile(rb'"note":"([^"]*)".*"shape":\[(\d+)\]', re.DOTALL)

    def believing(whole: memoryview, *, verify: bool) -> whole_file.WholeFile | None:
        start = whole_file.LENGTH_NBYTES + int.from_bytes(
            whole[: whole_file.LENGTH_NBYTES], "little"
        )
        found = note_of.search(bytes(whole[:start]))
        if found is None:
            return None
        content = bytes(whole[start:]).ljust(int(found[2]), b"\0")
        return whole_file.WholeFile(found[1], memoryview(content), 0)

    return patched(whole_file, "parse_whole", believing)


@mutant
def any_file_is_the_right_one() -> Planted:
    """F38: a value is taken by its file's name, though it says that it is of another image."""

    async def unasked(self: SimStorage, key: str, note: bytes, nbytes: int) -> Buffer | None:
        content = self._disk.read(key, await self._wait(nbytes))
        if content is None:
            return None
        found = whole_file.parse_whole(memoryview(content), verify=True)
        if found is None or found.payload.nbytes != nbytes:
            return None
        return found.payload

    return patched(SimStorage, "get", unasked)


@mutant
def a_load_is_waited_for() -> Planted:
    """F15: a storage that hangs holds up everybody who wants the image."""
    return row(ENCODING, S.LOADING, encoding.LoadTimedOut, None)


@mutant
def images_need_an_encoder() -> Planted:
    """F32: what storage has is of no use without an instance that can encode."""

    def without(infos: Iterable[InstanceInfo], *, with_images: bool, finds: bool = True) -> str:
        return lacking(infos, with_images=with_images, finds=False)

    lacking = placement.lacking
    return patched(placement, "lacking", without)


@mutant
def storage_is_asked_for_ever() -> Planted:
    """F40: what storage does not have is looked for there again, not taken to an encoder."""
    return patched(dispatch, "_is_absent", lambda machine: False)


@mutant
def absent_rows_are_zeros() -> Planted:
    """F40, F12: a prefill instance that finds no rows goes on without the image."""
    start_load = RowTiers.start_load

    async def zeros(self: RowTiers, machine: encoding.Encoding, event: Event) -> Event:
        outcome = await start_load(self, machine, event)
        if not isinstance(outcome, encoding.LoadMissed) or machine.encodes:
            return outcome
        nbytes = machine.num_rows * self._engine.contract.row_nbytes
        return encoding.LoadSucceeded(Rows(bytes(nbytes), machine.num_rows, nbytes))

    return patched(RowTiers, "start_load", zeros)


@mutant
def grants_do_not_overtake() -> Planted:
    """F24, F4: an encoder full of rows that nobody can take yet begins nothing, not even what all
    of them wait for."""
    return patched(EncodeRole, "_is_granted", lambda self, machine: False)


@mutant
def who_has_left_waits_for_its_turn() -> Planted:
    """F43: an image that nobody wants any more keeps its place in the queue, and is made."""
    return row(ENCODING, S.DEFERRED, encoding.RoomClosed, None, (), encoding.remove_room)


@mutant
def ring_slots_return_early() -> Planted:
    """F3: a slot returns to the ring when it is filled, while its send is in flight."""
    stage = RowProducer.stage

    async def early(self: RowProducer, room: Outgoing, grant: Grant) -> Staged:
        staged = await stage(self, room, grant)
        self.release_slots(room)
        return staged

    return patched(RowProducer, "stage", early)


@mutant
def a_full_ring_fails_the_send() -> Planted:
    """F4: who finds the ring full is told that it failed, instead of waiting."""
    lease = RowProducer.lease

    def busy(self: RowProducer, room: Outgoing) -> bool:
        waits = lease(self, room)
        if self.ring is not None and self.ring.waits(room.key):
            failure = Failure(FailureKind.TRANSFER, "the ring is full")
            self._rooms.post(room, outgoing.SourceFailed(failure))
        return waits

    return patched(RowProducer, "lease", busy)


@mutant
def oversized_waits_for_the_ring() -> Planted:
    """F4: an item larger than the ring waits for slots that there will never be."""
    return patched(SendRing, "fits", lambda self, nbytes: True)


@mutant
def a_lease_of_the_ring_is_not_told() -> Planted:
    """F4: who has waited for slots of the ring gets them, and does not begin to write."""
    lease, told = RowProducer.lease, OutgoingRooms._apply

    def quietly(self: OutgoingRooms, room: Outgoing, event: Event) -> None:
        if not (isinstance(event, outgoing.SlotsLeased) and room.key in waited):
            told(self, room, event)

    def noted(self: RowProducer, room: Outgoing) -> bool:
        waits = lease(self, room)
        if self.ring is not None and self.ring.waits(room.key):
            waited.add(room.key)
        return waits

    waited: set[str] = set()
    return several(patched(RowProducer, "lease", noted), patched(OutgoingRooms, "_apply", quietly))


@mutant
def ring_slots_never_return() -> Planted:
    """F43: a send that has ended, or is not wanted any more, keeps its slots and its place."""
    return patched(SendRing, "release", lambda self, room, slots: None)
