"""The owners of a room's memory, as `Transfers` sees them: who gives bytes, and who takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from epd.fsm.kernel import Event
from epd.fsm.transfer import Transfer
from epd.messages import Grant, KvState
from epd.transport.base import Buffer


class Staged(NamedTuple):
    """Bytes to be written, and the granted slots that they fill in order."""

    views: Sequence[Buffer]
    slots: Sequence[int]


class Producer(Protocol):
    """Who makes the bytes of a room and owns the source."""

    def commit_state(self, transfer: Transfer) -> KvState | None:
        """What the consumer needs besides the bytes."""
        ...

    def granted(self, transfer: Transfer) -> None:
        """The consumer has memory for it."""
        ...

    def hold_part(self, transfer: Transfer) -> None:
        """Own what is ready (`written_nbytes` to `ready_nbytes`) and nothing else."""
        ...

    async def stage(self, transfer: Transfer) -> Staged | None:
        """The bytes from `written_nbytes` on, `part_nbytes` of them, where a write may read them
        until they are released; None: the room was concluded while this waited for memory.
        Nothing of them has been written when it raises."""
        ...

    def release_source(self, transfer: Transfer) -> None:
        """Nothing reads the source any more."""
        ...

    def concluded(self, transfer: Transfer, *, delivered: bool) -> None: ...


class Consumer(Protocol):
    """Who wants the bytes of a room and owns the slots."""

    def withdraw_lease(self, transfer: Transfer) -> None:
        """Leave the line for slots."""
        ...

    def grant(self, transfer: Transfer) -> Grant:
        """Where the producer may write, now that slots are leased."""
        ...

    async def publish(self, transfer: Transfer) -> Event:
        """Check what landed: Published or PublishFailed."""
        ...

    def release_slots(self, transfer: Transfer) -> None:
        """Nothing writes into the slots any more."""
        ...

    def concluded(self, transfer: Transfer, *, delivered: bool) -> None: ...
