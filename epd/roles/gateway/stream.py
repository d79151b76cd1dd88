"""The stream that the API reads of one generation: updates in order, ended by exactly one last one.

Bounded by construction: a generation delivers at most `max_tokens` tokens.  `next_ready` takes what
is there without waiting, so that several tokens leave in one write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from epd.frontend import GenerationUpdate, Leave, TimelineEntry, TransferParams
from epd.roles.bell import Bell


class Stream:
    """An async iterator of `GenerationUpdate`; ends after the last update or after `cancel`."""

    def __init__(
        self,
        request_id: str,
        cancel: Callable[[Leave, str], None],
        transfer_params: Callable[[], TransferParams],
        timeline: Callable[[], list[TimelineEntry]],
    ) -> None:
        self.request_id = request_id
        self.client_request_id = ""
        self.transfer_params = transfer_params
        self.timeline = timeline
        self.on_concluded: Callable[[], None] = lambda: None
        self._on_cancel = cancel
        self._updates: deque[GenerationUpdate] = deque()
        self._news = Bell()
        self._closed = False

    def push(self, update: GenerationUpdate) -> None:
        self._updates.append(update)
        self._news.ring()

    def close(self) -> None:
        self._closed = True
        self._news.ring()

    def conclude(self) -> None:
        """The generation has ended: its timeline will not change any more."""
        final = self.timeline()
        self.timeline = lambda: final
        self.close()
        self.on_concluded()

    def cancel(self, why: Leave, reason: str) -> None:
        """The API reads no more: the iteration ends, and the instances get an abort."""
        if not self._closed:
            self.close()
            self._on_cancel(why, reason)

    def next_ready(self) -> GenerationUpdate | None:
        return self._updates.popleft() if self._updates else None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._updates:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news
        return self._updates.popleft()
