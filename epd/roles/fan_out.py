"""Writes of several parts, one outcome: FAN_OUT machines over whatever writes the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from epd.fsm.fan_out import Do, FanOut, PartEnded, PartFailed, PartUnknown, PartWritten
from epd.fsm.kernel import Event
from epd.groups.asks import WritePart
from epd.roles.base import Actor, Component, performs
from epd.transport.base import WriteFailed, WriteOutcome, WriteUnknown, Written


class FanOuts(Component[FanOut]):
    """Those under way at this instance, each with who waits for it."""

    fires = FanOut

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self._told: dict[FanOut, asyncio.Future[WriteOutcome]] = {}

    def live(self) -> dict[str, int]:
        return {"fan_outs": len(self._told)}

    async def write(self, key: str, parts: Sequence[WritePart]) -> WriteOutcome:
        """The outcome of all parts, when each has its own."""
        machine = FanOut(key, len(parts), self.actor.journal)
        told: asyncio.Future[WriteOutcome]
        told = self._told[machine] = asyncio.get_running_loop().create_future()
        for index, part in enumerate(parts):
            work = self._end_of(index, part, machine.key)
            self.actor.spawn(f"part {index} of {key}", work, partial(self.fire, machine))
        return await told

    async def _end_of(self, index: int, part: WritePart, key: str) -> PartEnded:
        try:
            outcome = await part()
        except Exception as error:
            self.actor.fault(f"part {index} of {key}", error)
            return PartUnknown(index, repr(error))
        if isinstance(outcome, Written):
            return PartWritten(index, outcome.nbytes, outcome.checksum)
        if isinstance(outcome, WriteFailed):
            return PartFailed(index, outcome.reason)
        return PartUnknown(index, outcome.reason)

    @performs(Do.TELL_WRITTEN)
    def tell_written(self, machine: FanOut, event: Event) -> None:
        self._tell(machine, Written(machine.nbytes, machine.checksum))

    @performs(Do.TELL_FAILED)
    def tell_failed(self, machine: FanOut, event: Event) -> None:
        self._tell(machine, WriteFailed(machine.reason))

    @performs(Do.TELL_UNKNOWN)
    def tell_unknown(self, machine: FanOut, event: Event) -> None:
        self._tell(machine, WriteUnknown(machine.reason))

    def _tell(self, machine: FanOut, outcome: WriteOutcome) -> None:
        told = self._told.pop(machine)
        if not told.done():  # else the process ends
            told.set_result(outcome)
