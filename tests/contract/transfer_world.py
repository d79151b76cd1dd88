"""What a check of the data plane's contract is given, and what it looks with.

It uses asyncio alone, so it runs on a virtual clock as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from epd.messages import Address
from epd.transport.base import DataPlane, Region, TransferEngine, WriteOutcome
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S
GUARD = 0xEE  # what untouched memory looks like


class TransferWorld(Protocol):
    def engine(self, instance_id: str, epoch: int = 1) -> TransferEngine:
        """A new engine with checksums on."""
        ...

    async def dead_peer(self) -> tuple[Address, str, int]:
        """Address, host id and pid of a peer of this world that died without cleaning up."""
        ...


class PlaneWorld(Protocol):
    """Data planes as roles have them, which reach each other over one transport."""

    transport: str

    def consumer(self) -> DataPlane: ...

    def producer(self, instance_id: str) -> DataPlane: ...


@dataclass(frozen=True)
class Doubt:
    """A write whose outcome nobody knows.

    `release` lets go of what held it up: from then on its bytes would land if nothing stopped them.
    """

    outcome: WriteOutcome
    owner: TransferEngine
    region: Region
    writer: tuple[Address, str, int]  # as `fence` wants it
    release: Callable[[], None]
    owner_as_seen: tuple[TransferEngine, tuple[Address, str, int]] | None = None  # if it can ask


class DoubtfulWorld(TransferWorld, Protocol):
    async def doubt(self) -> Doubt:
        """A write that this backend honestly cannot tell the end of."""
        ...


Check = Callable[[Any], Awaitable[None]]


def pattern(nbytes: int, salt: int = 0) -> bytes:
    """Bytes in which a shift, a swap or a stale copy shows: the period is prime."""
    period = bytes((i * 7 + salt * 13 + i // 5) % 251 for i in range(1009))
    return (period * (nbytes // 1009 + 1))[:nbytes]


def joined(region: Region, slots: Sequence[int], nbytes: int) -> bytes:
    return b"".join(region.views(slots, nbytes))


def guard(region: Region) -> None:
    region.buffer[:] = bytes([GUARD]) * region.buffer.nbytes


async def write(
    engine: TransferEngine, source: Sequence[Any], region: Region, slots: Sequence[int]
) -> WriteOutcome:
    async with asyncio.timeout(WAIT_S):
        return await engine.write(source, region.remote, slots)
