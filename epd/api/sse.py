"""Server-sent events: the frame of a streamed answer (fault F34).

The status line leaves with the first event and not before, so that what fails earlier is answered
with its own status.  After it, an error can only be told in-band: an event with an error object,
and none that says that the answer is whole (`[DONE]`), so that no client takes it for that.
"""

from __future__ import annotations

from epd.api.errors import ApiError
from epd.api.exchange import Exchange, Headers

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect events
]


async def send_events(exchange: Exchange, events: bytes) -> None:
    """One write of any number of whole events; the first one brings the headers."""
    if not exchange.started:
        await exchange.start(200, list(_HEADERS))
    await exchange.write(events, more=True)


async def end_events(exchange: Exchange, events: bytes) -> None:
    """The last events."""
    if not exchange.started:
        await exchange.start(200, list(_HEADERS))
    await exchange.write(events, more=False)


async def fail_events(exchange: Exchange, error: ApiError) -> None:
    """An error after the headers: told in-band, and the stream ends unfinished."""
    await exchange.write(exchange.failure(error), more=False)
