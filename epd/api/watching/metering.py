"""Where a measuring system hears of each request that has ended: the port."""

from __future__ import annotations

from epd.api.watching.tracing import Record


class Meter:
    """This one hears nothing: nobody wants to know."""

    def measure(self, record: Record) -> None:
        """Take a request whose response has ended; neither blocks nor fails."""

    async def close(self) -> None:
        """Export what is there, for a bounded time."""


NO_METER = Meter()
