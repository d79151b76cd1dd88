"""Every machine's table, in the order in which they are read."""

from __future__ import annotations

from epd.fsm import (
    adapter,
    child,
    embedding,
    encoding,
    fan_out,
    generation,
    group,
    incoming,
    instance,
    link,
    membership,
    offer,
    outgoing,
    request,
)
from epd.fsm.kernel import Table

TABLES: tuple[Table, ...] = (
    generation.TABLE,
    request.TABLE,
    encoding.TABLE,
    embedding.TABLE,
    outgoing.TABLE,
    incoming.TABLE,
    fan_out.TABLE,
    instance.TABLE,
    membership.TABLE,
    link.TABLE,
    offer.TABLE,
    child.TABLE,
    group.TABLE,
    adapter.TABLE,
)
