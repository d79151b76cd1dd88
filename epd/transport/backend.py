"""What a transfer backend is made of: its settings, its factory, and what it may do besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from epd.config import MOONCAKE_OVER_TCP, MooncakeConfig
from epd.messages import RemoteRegion
from epd.transport.base import TransferEngine
from epd.transport.region import SlotRegion


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend may need to know of its instance; each takes what concerns it."""

    instance_id: str
    epoch: int
    checksums: bool = False
    host: str = "127.0.0.1"  # where peers on other hosts can reach this one
    secret: bytes = b""  # of the cluster; required beyond loopback
    directory: str = ""  # shared by all instances; empty: below the system's temporary directory
    mooncake: MooncakeConfig = MOONCAKE_OVER_TCP
    name: str = ""  # as peers know it: `RemoteRegion.backend` of what it allocates
    options: Mapping[str, Any] = field(default_factory=dict)  # of a backend of others


@runtime_checkable
class Exposes(Protocol):
    """A backend by which peers can write to memory that another backend has made."""

    def expose(self, region: SlotRegion) -> RemoteRegion:
        """Let peers reach this region; the descriptor by which they do."""
        ...

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        """Not any more; the region is about to be revoked."""
        ...


BackendFactory = Callable[[BackendSettings], TransferEngine]
