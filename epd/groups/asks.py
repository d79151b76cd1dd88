"""What a group's leader asks of another rank beside the steps, and what the rank answers.

The ranks of a group are one program in several processes.  A leader that has no other rank does the
same things without asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from epd.engine.base import EngineError
from epd.errors import Told
from epd.messages import Address, Record, RemoteRegion
from epd.transport.base import WriteFailed, WriteOutcome, WriteUnknown, Written

T = TypeVar("T")
LandedWrites = Sequence[tuple[Sequence[int], int]]  # of each: slots, and how many bytes
WritePart = Callable[[], Awaitable[WriteOutcome]]
RankPlace = tuple[str, int]  # of its process: host_id and pid
Heads = tuple[int, int]  # the first, and behind the last; of a rank's own


async def of_all(answers: Sequence[Awaitable[T]]) -> list[T]:
    """What the ranks answer, in their order, when all have: whose memory it is waits for those that
    did not fail.  One rank costs no task."""
    if len(answers) == 1:
        return [await answers[0]]
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


class RankLost(EngineError):
    """A rank has ended, and its group with it: what it was doing is unknown."""


class GroupLost(Told):
    """A rank could not be loaded; the text is its own sentence."""


class Ask(Record, tag=True):
    """Done as soon as it comes; those that take time overtake each other."""


class WriteKv(Ask):
    """Write own KV, which is final, to a rank of another instance."""

    slots: tuple[int, ...]
    target: RemoteRegion
    target_slots: tuple[int, ...]
    heads: Heads | None = None  # only these, one by one; None: whole slots


class WriteState(Ask):
    """Write the final state in these blocks, of these heads, to a rank of another instance."""

    blocks: tuple[int, ...]
    heads: Heads
    target: RemoteRegion
    target_slots: tuple[int, ...]


class LandKv(Ask):
    """Take in what has landed."""

    transport: str
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    heads: tuple[Heads, ...] = ()  # it came head by head, these from one rank; none: whole slots
    states: tuple[Heads, ...] = ()  # likewise of the state, in the last blocks; none: as the rest
    summed: tuple[tuple[int, ...], ...] = ()  # the slots of each write whose sum is wanted


class SumRows(Ask):
    """So many bytes of rows that have landed."""

    transport: str
    slots: tuple[int, ...]
    nbytes: int


class ReadAdapter(Ask):
    """Have this rank's part of an adapter ready (`AdapterParts`)."""

    digest: str
    path: str


class Settle(Ask):
    peer: Address


class Fence(Ask):
    peer: Address
    host_id: str
    pid: int
    has_ended: bool = False


class Sums(Record, tag=True):
    """Of each write: the checksums of what landed from each rank, added up."""

    sums: tuple[int, ...]


class Holds(Record, tag=True):
    holds: bool


class Fault(Record, tag=True):
    reason: str


AnyAsk = WriteKv | WriteState | LandKv | SumRows | ReadAdapter | Settle | Fence
Answer = Written | WriteFailed | WriteUnknown | Sums | Holds | Fault


class Joined(Record):
    """The data plane of a rank that is there."""

    regions: tuple[tuple[str, str, RemoteRegion], ...]  # its name, a transport, how peers reach it


class OtherRanks(Protocol):
    joined: dict[int, Joined]  # by rank

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """In the order of ranks."""

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        """Raises RankLost; and EngineError for a fault."""


A = TypeVar("A", LandKv, SumRows)


async def added_up(
    own: Callable[[A], Awaitable[Sums]], others: OtherRanks | None, asks: Sequence[A]
) -> list[int]:
    """Each write's checksum of what landed at all ranks; `asks`: of each, the first for the `own`
    one."""

    async def at(rank: int, ask: A) -> tuple[int, ...]:
        if not rank:
            return (await own(ask)).sums
        assert others is not None
        answer = await others.ask(rank, ask)
        assert isinstance(answer, Sums)
        return answer.sums

    sums = await of_all([at(rank, ask) for rank, ask in enumerate(asks)])
    return [sum(each) & 0xFFFFFFFF for each in zip(*sums, strict=True)]
