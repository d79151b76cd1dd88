"""A data plane that asks its peers over `PeerLinks`."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.host_engine import HostEngine
from epd.transport.host_memory import anonymous
from epd.transport.linked.links import PeerLinks
from epd.transport.linked.wire import Wire
from epd.transport.region import SlotRegion, check_shape


class LinkedEngine(HostEngine):
    """Asks peers over `PeerLinks`.  Raises TransportError when the address cannot be used."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._links: PeerLinks = PeerLinks(self._life, its.host, its.secret, self._on_frame)

    @property
    def domain(self) -> str:
        return self._links.domain

    @property
    def refused(self) -> Counter[str]:
        return self._links.refused

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Zeroed, resident memory behind this instance's listener."""
        memory = anonymous(check_shape(name, num_slots, slot_nbytes))
        region_id = self._region_ids.new(name)
        remote = self._remote(region_id, self._locator(memory), num_slots, slot_nbytes)
        region = self._own[region_id] = SlotRegion(remote, memory, by_reference=by_reference)
        return region

    def expose(self, region: SlotRegion) -> RemoteRegion:
        own = region.remote
        locator = self._locator(region.buffer)
        self._own[own.region_id] = region
        return self._remote(own.region_id, locator, own.num_slots, own.slot_nbytes)

    def _locator(self, memory: memoryview) -> str:
        """Where peers ask for what lies here."""
        return self._links.listen()

    @abstractmethod
    def _on_frame(self, wire: Wire, frame: object) -> None:
        """A peer's frame."""
