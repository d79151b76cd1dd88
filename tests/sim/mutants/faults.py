"""Bugs that raising calls, lying bytes, dead threads, messages of the dead and jumping clocks
show."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec

from epd.engine.base import Rows
from epd.fsm import encoding, incoming, instance, membership, outgoing
from epd.fsm.incoming import Incoming
from epd.fsm.kernel import Event
from epd.fsm.outgoing import Outgoing
from epd.fsm.room import Room
from epd.messages import Membership
from epd.roles.base import Actor
from epd.roles.encode.role import EncodeRole
from epd.roles.encode.row_tiers import RowTiers
from epd.roles.gateway.registry import Registry
from epd.roles.incoming import IncomingRooms
from epd.roles.member import Member
from epd.roles.outgoing import OutgoingRooms
from epd.roles.rooms import Rooms
from epd.roles.steps.step_loop import StepLoop
from epd.transport.base import Buffer, Received, WriteFailed
from epd.transport.files import whole_file
from epd_lab.sim.core.breaks import BrokenCall
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.planes.storage import SimStorage
from epd_lab.sim.planes.transfer import SimTransferEngine
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

# --- calls that raise -----------------------------------------------------------------------------


@mutant
def a_raise_leaves_its_image_open() -> Planted:
    """F14: an image whose preparation raises is never heard of again."""

    async def start(self: EncodeRole, machine: encoding.Encoding, event: Event) -> Event:
        return encoding.PreprocessSucceeded(
            await self._engine.preprocess(
                machine.image, machine.expected, machine.clip, machine.bounds
            )
        )

    return patched(EncodeRole, "start_preprocess", start)


@mutant
def a_raise_ends_the_batches() -> Planted:
    """F13: a vision batch that raises ends the task that runs them, with what is in its hands."""

    async def encode(self: EncodeRole, patches: list[Any]) -> list[Event]:
        results = await self._engine.encode(patches)
        return [
            encoding.EncodeSucceeded(result)
            if isinstance(result, Rows)
            else encoding.EncodeFailed(result.reason)
            for result in results
        ]

    return patched(EncodeRole, "_encode", encode)


@mutant
def a_step_that_raises_never_ends() -> Planted:
    """F13, F14: who was in a step that raised is not told of it."""
    settle = StepLoop._settle

    def but_raised(self: StepLoop, step: Any) -> None:
        if not isinstance(step.result.exception(), BrokenCall):
            settle(self, step)

    return patched(StepLoop, "_settle", but_raised)


@mutant
def a_raise_is_a_refusal() -> Planted:
    """F8: a write that raised is taken for one that moved nothing; its source is used again."""
    write = SimTransferEngine.write

    async def refused(self: SimTransferEngine, source: Any, target: Any, slots: Any) -> Any:
        try:
            return await write(self, source, target, slots)
        except BrokenCall as error:
            return WriteFailed(str(error))

    return patched(SimTransferEngine, "write", refused)


@mutant
def staging_that_raises_is_not_told() -> Planted:
    """F14: a copy before a write raises, and the room waits for a write that nobody makes."""
    start_write = OutgoingRooms.start_write

    async def silently(self: OutgoingRooms, machine: Outgoing, event: Event) -> Event | None:
        outcome = await start_write(self, machine, event)
        is_raise = isinstance(outcome, outgoing.WriteRefused) and "BrokenCall" in outcome.reason
        return None if is_raise else outcome

    return patched(OutgoingRooms, "start_write", silently)


@mutant
def a_read_that_raises_fails_the_image() -> Planted:
    """F32: a storage that raises is not a miss, but the end of whoever asked."""
    start_load = RowTiers.start_load

    async def load(self: RowTiers, machine: encoding.Encoding, event: Event) -> Event:
        fault = self.actor.fault
        raised: list[Exception] = []
        with patched(
            self.actor, "fault", lambda where, error: (raised.append(error), fault(where, error))
        ):
            outcome = await start_load(self, machine, event)
        if raised:
            self._owner.post(machine, encoding.LoadTimedOut())
            return encoding.PreprocessFailed("the disk is broken")
        return outcome

    return patched(RowTiers, "start_load", load)


@mutant
def what_cannot_be_summed_is_right() -> Planted:
    """F14: publishing raises, and its room stays as it is."""
    publish = IncomingRooms.publish

    async def unless_raised(self: IncomingRooms, machine: Incoming, event: Event) -> Event | None:
        outcome = await publish(self, machine, event)
        is_raise = isinstance(outcome, incoming.PublishFailed) and "BrokenCall" in outcome.reason
        return None if is_raise else outcome

    return patched(IncomingRooms, "publish", unless_raised)


# --- doubts ---------------------------------------------------------------------------------------


@mutant
def no_answer_settles() -> Planted:
    """F7, F8: a peer that does not answer is taken for one that takes no bytes any more."""
    settle = SimTransferEngine.settle

    async def hopeful(self: SimTransferEngine, peer: Any) -> bool:
        life = (peer.instance_id, peer.epoch)
        return not self._fabric.witnesses.answers(self._process, life) or await settle(self, peer)

    return patched(SimTransferEngine, "settle", hopeful)


@mutant
def doubts_about_the_dead_stay() -> Planted:
    """F8: who was lost is asked about writes to it for ever, instead of being fenced."""

    async def ask(self: OutgoingRooms, machine: Outgoing, event: Event) -> Event | None:
        if await self._holds(machine, self.actor.ports.transfers.settle(machine.peer)):
            return outgoing.WriteSettled()
        self._ask_again(machine)
        return None

    return patched(OutgoingRooms, "settle_write", ask)


@mutant
def the_end_of_a_process_is_the_end_of_its_bytes() -> Planted:
    """F7: a writer on another host that is dead is fenced, though none of that host attests it."""

    async def fence(
        self: SimTransferEngine, peer: Any, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        life = (peer.instance_id, peer.epoch)
        self._fabric.barred.add((self._life, life))
        return not self._fabric.lives[life].alive

    return patched(SimTransferEngine, "fence", fence)


@mutant
def a_fence_is_asked_for_once() -> Planted:
    """F7: a fence that does not hold yet never does, though a later life could attest it."""

    async def fence(self: IncomingRooms, machine: Incoming, event: Event) -> Event | None:
        with patched(self, "_ask_again", lambda room: None):
            return await self._fence(machine, incoming.PeerFenced())

    return patched(IncomingRooms, "start_fence", fence)


@mutant
def a_settle_that_raises_has_settled() -> Planted:
    """F8: an engine that fails to answer is believed to have said yes."""

    async def holds(self: Rooms[Any, Any], room: Room, answer: Awaitable[bool]) -> bool:
        try:
            return await answer
        except BrokenCall as error:
            self.actor.fault(f"doubt about {room.key}", error)
            return True

    return patched(Rooms, "_holds", holds)


# --- bytes and disks ------------------------------------------------------------------------------


@mutant
def the_last_part_is_not_summed() -> Planted:
    """F54: what goes with the first token is believed as it lands."""
    check = IncomingRooms.check_bytes

    async def but_the_last(self: IncomingRooms, machine: Any, *how: Any) -> Event:
        *head, last = machine.parts
        with patched(machine, "parts", [*head, (last[0], 0)]):
            return await check(self, machine, *how)

    return patched(IncomingRooms, "check_bytes", but_the_last)


@mutant
def a_refused_write_is_committed() -> Planted:
    """F54: that the transport refused what arrived is not looked at, nor is it summed again."""
    start_write = OutgoingRooms.start_write

    async def anyway(self: OutgoingRooms, machine: Outgoing, event: Event) -> Event:
        outcome = await start_write(self, machine, event)
        if isinstance(outcome, outgoing.WriteRefused) and "another sum" in outcome.reason:
            return outgoing.WriteSucceeded(0)
        return outcome

    return patched(OutgoingRooms, "start_write", anyway)


@mutant
def what_was_stored_is_not_encoded_again() -> Planted:
    """F32: a value that the disk has taken is believed to be there: a file of no bytes is zeros."""
    put, get = SimStorage.put, SimStorage.get

    async def noted(self: SimStorage, key: str, note: bytes, value: Any) -> bool:
        kept = await put(self, key, note, value)
        if kept:
            self.__dict__.setdefault("kept", set()).add(key)
        return kept

    async def until_given(self: SimStorage, key: str, note: bytes, nbytes: int) -> Buffer | None:
        found = await get(self, key, note, nbytes)
        if found is None and key in self.__dict__.get("kept", ()):
            return bytes(nbytes)
        return found

    return several(patched(SimStorage, "put", noted), patched(SimStorage, "get", until_given))


@mutant
def any_build_wrote_this_file() -> Planted:
    """F12, F38: a value is taken by its image, whatever type its numbers have."""

    async def by_key(self: SimStorage, key: str, note: bytes, nbytes: int) -> Buffer | None:
        content = self._disk.read(key, await self._wait(nbytes, "get"))
        found = whole_file.parse_whole(memoryview(content), verify=True) if content else None
        if found is None or found.note.split()[0] != note.split()[0]:
            return None
        return found.payload if found.payload.nbytes == nbytes else None

    return patched(SimStorage, "get", by_key)


@mutant
def files_are_not_summed() -> Planted:
    """F32: what is read from a disk is not verified: its header is enough."""
    parse = whole_file.parse_whole

    def unverified(whole: memoryview, *, verify: bool) -> whole_file.WholeFile | None:
        return parse(whole, verify=False)

    return patched(whole_file, "parse_whole", unverified)


# --- threads --------------------------------------------------------------------------------------


@mutant
def a_dead_thread_leaves_its_futures() -> Planted:
    """F14, F49: nobody notices that a device's thread has ended; its calls are never over."""
    run = SimDevice.run

    def queue(self: SimDevice, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            return self._loop.create_future()
        return run(self, *args, **kwargs)

    def end(self: SimDevice) -> None:
        self.dead = True

    return several(patched(SimDevice, "run", queue), patched(SimDevice, "lose_thread", end))


# --- messages of the dead -------------------------------------------------------------------------


@mutant
def a_former_gateway_is_believed() -> Planted:
    """F35, F58: the members that a gateway's earlier life knew count, when it speaks last."""
    return patched(membership.Membership, "is_former", lambda self, epoch: False)


@mutant
def numbers_of_two_registries_are_compared() -> Planted:
    """F35, F44: who lost the welcome of a new gateway goes on with a list of the former one."""
    former = Actor.is_former

    def unfollowed(self: Member, received: Received) -> bool:
        is_list = isinstance(received.message, Membership)
        if former(self.actor, received):
            return False
        if is_list:
            self._follow(self._at(received), received.epoch)
        return True

    effects = (membership.Do.NOTE_FORMER_LOST,)
    cut_off = (membership.S.CUT_OFF, membership.S.DRAINING_CUT_OFF)
    rows = (row(membership.TABLE, s, membership.GatewayReplaced, None, effects) for s in cut_off)
    return several(patched(Member, "_hears", unfollowed), *rows)


@mutant
def messages_count_whoever_said_them() -> Planted:
    """F44, F58: a heartbeat is taken by its sender's name: its successor seems to leave."""

    def by_name(self: Registry, received: Received) -> Any:
        return self._instances.get(received.source)

    return patched(Registry, "_of", by_name)


@mutant
def who_comes_late_is_welcome() -> Planted:
    """F7, F35: a new gateway welcomes a life that its peers have given up and fenced meanwhile."""
    on_join = Registry.on_join

    def forgetful(self: Registry, received: Received) -> None:
        message = msgspec.structs.replace(received.message, was_member=False)
        on_join(self, received._replace(message=message))

    return patched(Registry, "on_join", forgetful)


# --- clocks ---------------------------------------------------------------------------------------


@mutant
def deadlines_are_of_the_wall_clock() -> Planted:
    """F57: setting the clock of a host ends its requests, or keeps them for ever."""

    def until(self: Actor, deadline_s: float, gateway: str) -> float:
        return deadline_s - self.clock.wall_s()

    return patched(Actor, "until", until)


@mutant
def who_slept_takes_all_for_lost() -> Planted:
    """F57: the time that a gateway did not listen is counted as its instances' silence."""

    def nothing(self: Registry, machine: instance.Instance, event: Event) -> None:
        pass

    return patched(Registry, "watch_on", nothing)
