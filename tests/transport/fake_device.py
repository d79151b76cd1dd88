"""A GPU whose driver is a stand-in (`stand_in_driver.py`): its memory is the host's.

`make` is a foreign backend over it (`--transport tests.transport.fake_device:make`), so that
instances in processes of their own move rows and KV as they do between GPUs.
"""

from __future__ import annotations

import ctypes

from epd.transport.backend import BackendSettings
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.cuda.driver import CudaDevice, CudaMemory
from epd.transport.nixl.library import MEMORY, Agent
from epd.transport.nixl.on_device import NixlDeviceEngine
from tests.transport.stand_in_driver import NAME, StandIn

__all__ = ["NAME", "FakeDevice", "make"]


class FakeMemory(CudaMemory):
    """To be looked at as the host's."""

    @property
    def whole(self) -> memoryview:  # type: ignore[override]
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")


class FakeDevice(CudaDevice):
    """`calls` is what the driver was told, and lets it fail."""

    def __init__(self) -> None:
        self.calls = StandIn()
        super().__init__(0, self.calls.driver)

    def allocate(self, nbytes: int) -> CudaMemory:
        memory = super().allocate(nbytes)
        memory.__class__ = FakeMemory
        return memory

    def allocate_plain(self, nbytes: int) -> CudaMemory:
        memory = super().allocate_plain(nbytes)
        memory.__class__ = FakeMemory
        return memory


class NixlOnFakeDevice(NixlDeviceEngine):
    """Whose memory NIXL takes for the host's, which it is."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its, FakeDevice())

    def _moved_by(self, its: BackendSettings) -> Agent:
        agent = super()._moved_by(its)
        agent.device_memory = MEMORY
        return agent


def make(its: BackendSettings) -> CudaTransferEngine:
    engine = CudaTransferEngine(its, FakeDevice(), str(its.options.get("directory", "")))
    engine.kind = its.name or engine.kind
    return engine
