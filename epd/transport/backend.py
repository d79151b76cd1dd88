"""What a transfer backend is: all that the rest of `epd` has of one way to move bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from epd.config import MOONCAKE_OVER_TCP, MooncakeConfig
from epd.messages import RemoteRegion
from epd.transport.base import Region, TransferEngine
from epd.transport.region import SlotRegion

if TYPE_CHECKING:
    from epd.transport.cuda.device import DeviceMemory


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """All that a backend may need of its instance; each takes its own part."""

    instance_id: str
    epoch: int
    checksums: bool = False
    host: str = "127.0.0.1"  # where peers on other hosts can reach this one
    secret: bytes = b""  # of the cluster; required beyond loopback
    directory: str = ""  # shared by all instances; empty: below the system's temporary directory
    mooncake: MooncakeConfig = MOONCAKE_OVER_TCP
    name: str = ""  # as peers know it: `RemoteRegion.backend` of what it allocates
    options: Mapping[str, Any] = field(default_factory=dict)  # of a backend of others
    device: str = "cpu"  # what computes


class BackendEngine(TransferEngine, Protocol):
    """The engine of one instance; two reach each other exactly if `domain` is equal."""

    @property
    def domain(self) -> str:
        """Raises TransportError where it has none."""


@runtime_checkable
class Exposes(Protocol):
    """A backend by which peers can write to memory that another backend has made."""

    def expose(self, region: SlotRegion) -> RemoteRegion:
        """Let peers reach this region; the descriptor by which they do."""

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        """No write begins any more; the region is about to be revoked."""


@runtime_checkable
class OnDevice(Protocol):
    """A backend whose regions lie in a device's memory, which it reads, too."""

    def register(self, name: str, memory: object, slot_nbytes: int) -> Region:
        """Memory that `Backend.memory` has made, as a region."""

    def recut(self, region: Region, num_parts: int) -> Region:
        """The same memory in finer slots."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to move bytes; `epd.transport.backends` lists those that there are.

    `is_offered`: whether an instance offers it under `auto`, whose bus listens at this endpoint and
    whose shared directory is this one.  `lacks`: why it cannot be used on this host.
    """

    name: str
    rank: int  # a pair of instances uses the lowest that both offer
    leaves_host: bool  # what it writes leaves the host's memory: summed under `auto`
    make: Callable[[BackendSettings], BackendEngine]
    is_offered: Callable[[str, str], bool]
    domain: str  # what an engine's domain names, in words
    offered: str  # and when it is offered
    lacks: Callable[[], str] = str
    is_expected: bool = False  # `auto` offers it wherever nothing is missing
    # So many bytes of this device, for `OnDevice.register`; `whole` is a buffer of all.  Raises
    memory: Callable[[str, int], DeviceMemory] | None = None  # TransportError

    @property
    def on_device(self) -> bool:
        """Its engine is `OnDevice`."""
        return self.memory is not None
