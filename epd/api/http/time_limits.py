"""How long a client waits, where its headers set it.

Three headers, in seconds: for the first token, for each one after it, for the whole.  Each lowers a
setting of the gateway (`timing.*_timeout_s`); more than the setting is refused rather than cut to
it, because a client that believes in an hour plans for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from epd.api.http.errors import bad_request
from epd.frontend import TimeLimits


def read_time_limits(headers: Mapping[bytes, bytes], most: TimeLimits) -> TimeLimits:
    """Of one request; `most`: what may be asked for.  Raises ApiError 400."""
    return TimeLimits(
        _seconds(headers, "X-EPD-First-Token-Timeout", most.first_token_s),
        _seconds(headers, "X-EPD-Token-Timeout", most.token_s),
        _seconds(headers, "X-EPD-Request-Timeout", most.total_s),
    )


def _seconds(headers: Mapping[bytes, bytes], name: str, most_s: float) -> float:
    text = headers.get(name.lower().encode())
    if text is None:
        return most_s
    try:
        value_s = math.nan if b"_" in text else float(text)  # as in Python's own numbers
    except ValueError:
        value_s = math.nan
    if not 0.0 < value_s <= most_s:
        shown = text[:40].decode("latin-1")
        message = f"{name} is {shown!r}; it takes seconds, above 0 and at most {most_s:g}"
        raise bad_request(message, name)
    return value_s
