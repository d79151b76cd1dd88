"""What goes between a group's leader and another rank, in order, over a socket of theirs."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace

import msgspec

from epd.engine.base import Patches, SlotRows, StepSequence
from epd.groups.asks import Answer, AnyAsk, Joined
from epd.groups.leader import ChangeAdapters, Command, Encode, GoOn, Probe, Step

_LENGTH = struct.Struct("!I")


class Numbered(msgspec.Struct, frozen=True, tag=True):
    """A command, which computes nothing where it has none of these.  Pixels, and rows that the
    leader has, are not in it: ranks share them (`SharedTower`, `SharedRows`)."""

    number: int
    step: list[StepSequence] | None = None
    images: list[Patches] | None = None
    num_turns: int = 0  # of the images
    goes_on: bool = False
    adapters: tuple[tuple[str, ...], str] | None = None  # those that go, and the one that comes

    @property
    def command(self) -> Command:
        if self.step is not None:
            return Step([_with_rows(s, _known) for s in self.step])
        if self.images is not None:
            return Encode(self.images, self.num_turns)
        if self.adapters is not None:
            return ChangeAdapters(*self.adapters)
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
        case ChangeAdapters(dropped, held):
            return Numbered(number, adapters=(tuple(dropped), held))
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


class AskSent(msgspec.Struct, frozen=True, tag="Asked"):
    """Something beside the steps."""

    serial: int
    ask: AnyAsk


class Present(msgspec.Struct, frozen=True, tag=True):
    """Of a rank: it is loaded."""

    joined: Joined


class Executed(msgspec.Struct, frozen=True, tag=True):
    """Of a rank: a command, done or failed; number 0: it cannot go on, or was never loaded."""

    number: int
    failure: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Of a rank: its process runs."""


class AskAnswered(msgspec.Struct, frozen=True, tag="Answered"):
    """Of a rank: what came of what it was asked."""

    serial: int
    answer: Answer


Order = Numbered | AskSent
Reply = Present | Executed | Beat | AskAnswered

_encode = msgspec.msgpack.Encoder(enc_hook=lambda tensor: tensor.tolist()).encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(content: msgspec.Struct) -> bytes:
    data = _encode(content)
    return _LENGTH.pack(len(data)) + data


def encode_command(number: int, command: Command) -> bytes:
    return frame(numbered(number, command))


async def frame_of(reader: asyncio.StreamReader, most: int = 1 << 30) -> bytes:
    """Raises EOFError or OSError when the other end is gone, or sends more bytes than `most`."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise EOFError(f"a frame of {length} bytes")
    return await reader.readexactly(length)
