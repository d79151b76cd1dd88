"""The port that gives a measuring system each request that has ended."""

from __future__ import annotations

from epd.api.watching.tracing import Record


class Meter:
    """This one measures nothing."""

    def measure(self, record: Record) -> None:
        """Take a request whose response has ended; neither blocks nor fails."""

    async def close(self) -> None:
        """Export what is there, for a bounded time."""


NO_METER = Meter()
