"""Data plane over NIXL's agents: one-sided writes between hosts, each with leave.

See `epd.transport.linked.leave`, which has the outcomes and the fence."""

from __future__ import annotations

from epd.transport.backend import BackendSettings
from epd.transport.linked.leave import LeaveEngine
from epd.transport.nixl.library import Agent


class NixlTransferEngine(LeaveEngine):
    """One instance's data plane over NIXL.  Raises TransportError, also without the library."""

    kind = "nixl"

    def _moved_by(self, its: BackendSettings) -> Agent:
        return Agent(f"{its.instance_id}-{its.epoch}")
