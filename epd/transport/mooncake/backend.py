"""Data plane over mooncake's transfer engine: one-sided writes between hosts, each with leave.

See `epd.transport.linked.leave`, which has the outcomes and the fence."""

from __future__ import annotations

from epd.transport.backend import BackendSettings
from epd.transport.linked.leave import LeaveEngine
from epd.transport.mooncake.library import Library


class MooncakeTransferEngine(LeaveEngine):
    """One instance's data plane over mooncake.  Raises TransportError, also without the library."""

    kind = "mooncake"

    def _moved_by(self, its: BackendSettings) -> Library:
        return Library.acquire(its.host, its.mooncake)
