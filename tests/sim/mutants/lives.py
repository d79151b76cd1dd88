"""Bugs of processes that go on as another epoch put back."""

from __future__ import annotations

from epd.messages import Address
from epd.roles.rooms import Rooms
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.planes.transfer import SimTransferEngine
from tests.sim.mutants.planting import Planted, mutant, patched


@mutant
def a_life_begins_while_the_last_one_writes() -> Planted:
    """F7, F44: a process attests the end of an epoch whose bytes still move."""

    async def close(self: SimTransferEngine) -> bool:
        return True

    return patched(SimTransferEngine, "close", close)


@mutant
def a_life_begins_while_the_last_one_steps() -> Planted:
    """F29: a step of the former epoch writes into the pool of the next one."""

    async def rest(self: SimDevice) -> bool:
        return True

    return patched(SimDevice, "rest", rest)


@mutant
def the_lost_are_taken_for_ended() -> Planted:
    """F7: an epoch that was declared lost counts as ended by the word of its process."""

    def attests(self: Rooms[object, object], peer: Address) -> bool:  # type: ignore[type-var]
        return True

    return patched(Rooms, "_attests_end", attests)


@mutant
def nobody_believes_in_the_end_of_a_life() -> Planted:
    """F8: memory that an ended epoch was granted stays owned as long as its process goes on."""

    def attests(self: Rooms[object, object], peer: Address) -> bool:  # type: ignore[type-var]
        return False

    return patched(Rooms, "_attests_end", attests)
