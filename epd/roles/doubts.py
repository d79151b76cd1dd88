"""Memory whose transfer's outcome is unknown: who is asked, until somebody can tell.

While both ends are trusted only the writer can tell: its engine settles what it has begun, which
bars nobody.  A peer that was lost is fenced, which bars it for good, should it live.  A consumer
therefore never fences a peer that the registry lists: that one is alive and hears `CancelTransfer`
again and again, so its own word comes, or its loss does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from epd.config import Timing
from epd.fsm import transfer as fsm
from epd.fsm.kernel import Event
from epd.fsm.transfer import Do, Transfer
from epd.roles.base import Actor, Role, performs


class Doubts(Role[Transfer]):
    """Performs for the role that fires TRANSFER machines; `ask_again` fires a retry later."""

    def __init__(
        self, actor: Actor, timing: Timing, ask_again: Callable[[Transfer, float], None]
    ) -> None:
        super().__init__(actor)
        self._later = ask_again
        self._interval_s = timing.retry_interval_s

    @performs(Do.SETTLE_WRITE)
    async def settle_write(self, transfer: Transfer, event: Event) -> Event | None:
        if self.actor.is_lost(transfer.peer):
            return await self.start_fence(transfer, event)
        if await self._holds(transfer, self.actor.ports.transfers.settle(transfer.peer)):
            return fsm.WriteSettled()
        self._ask_again(transfer)
        return None

    @performs(Do.START_FENCE)
    async def start_fence(self, transfer: Transfer, event: Event) -> Event | None:
        peer = transfer.peer
        if not self.actor.is_listed(peer):
            info = self.actor.peer_info(peer)
            host_id, pid = (info.host_id, info.pid) if info is not None else ("", 0)
            fence = self.actor.ports.transfers.fence(peer, host_id, pid)
            if await self._holds(transfer, fence):
                return None if transfer.terminal else fsm.PeerFenced()
        self._ask_again(transfer)
        return None

    async def _holds(self, transfer: Transfer, answer: Awaitable[bool]) -> bool:
        """An engine that fails to answer cannot tell; it is asked again."""
        try:
            return await answer
        except Exception as error:
            self.actor.fault(f"doubt about {transfer.key}", error)
            return False

    def _ask_again(self, transfer: Transfer) -> None:
        if not transfer.terminal:
            self._later(transfer, self._interval_s)
