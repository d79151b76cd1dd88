"""The audit log: who asked which path when, and what came of it; never the content.

A line is one of the log, of this logger, whatever the log's level.  Every value of it is
the gateway's own: a client chooses none but its address, and which of its paths it asks.  So
no prompt, answer, image or URL can be in it.
"""

from __future__ import annotations

import logging

from epd.api.http.access import OPEN
from epd.api.http.exchange import Exchange

FIELDS = "epd_fields"  # by which a log's formatter finds them
log = logging.getLogger(__name__)
log.setLevel(logging.INFO)


def note(exchange: Exchange, path: str, *, with_address: bool) -> None:
    """One request at its end; `path`: one that the gateway has, or `other`; status 0: the client
    left before there was one."""
    if path in OPEN:
        return
    fields: dict[str, str | int | float] = {
        "key": exchange.caller.name,
        "tenant": exchange.caller.tenant,
        "method": exchange.method,
        "path": path,
        "status": exchange.status,
        "lasted_s": round(exchange.age_s, 3),
        "request": exchange.generation_id,
        "input_tokens": exchange.num_input_tokens,
        "output_tokens": exchange.num_output_tokens,
    }
    if with_address:
        fields["address"] = exchange.address
    log.info("audit", extra={FIELDS: fields})
