"""The commands of a group as they travel to its other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from epd.engine.base import Patches, SlotRows, StepSequence
from epd.groups.leader import Command, Encode, GoOn, Probe, Step


class Numbered(msgspec.Struct, frozen=True, tag=True):
    """A command, which computes nothing where it has none of these.  Pixels, and rows that the
    leader has, are not in it: ranks share them (`SharedTower`, `SharedRows`)."""

    number: int
    step: list[StepSequence] | None = None
    images: list[Patches] | None = None
    num_turns: int = 0  # of the images
    goes_on: bool = False

    @property
    def command(self) -> Command:
        if self.step is not None:
            return Step([_with_rows(s, _known) for s in self.step])
        if self.images is not None:
            return Encode(self.images, self.num_turns)
        return GoOn() if self.goes_on else Probe()


def numbered(number: int, command: Command) -> Numbered:
    match command:
        case Step(batch):
            return Numbered(number, [_with_rows(sequence, _told) for sequence in batch])
        case Encode(batch, num_turns):
            from epd.groups.device.shared_tower import kind_of

            images = [replace(p, pixels=kind_of(p.pixels)) for p in batch]
            return Numbered(number, images=images, num_turns=num_turns)
        case GoOn():
            return Numbered(number, goes_on=True)
        case Probe():
            return Numbered(number)


def _with_rows(sequence: StepSequence, change: Callable[[object], SlotRows | None]) -> StepSequence:
    spans = tuple(replace(span, rows=change(span.rows)) for span in sequence.spans)
    return replace(sequence, spans=spans) if spans else sequence


def _told(rows: object) -> SlotRows | None:
    return rows if isinstance(rows, SlotRows) else None


def _known(rows: object) -> SlotRows | None:
    """What could be of any type comes as what it is made of."""
    return None if rows is None else msgspec.convert(rows, SlotRows)
