"""Owners and writers of a device's memory, here and in processes of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from epd.transport.backend import BackendSettings
from epd.transport.cuda.backend import CudaTransferEngine
from tests.patience import PATIENCE_S
from tests.transport.fake_device import NAME, FakeDevice
from tests.transport.test_shm_processes import Family as ShmFamily


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def num_mapped() -> int:
    """Mappings of a device's memory in this process."""
    return Path("/proc/self/maps").read_text().count(NAME)


def threads() -> set[threading.Thread]:
    """Those of all engines with devices in this process."""
    return {one for one in threading.enumerate() if one.name.startswith("epd-cuda")}


class Family(ShmFamily):
    def device(
        self, instance_id: str, epoch: int = 1, made: FakeDevice | None = None, *,
        checksums: bool = False,
    ) -> CudaTransferEngine:  # fmt: skip
        engine = CudaTransferEngine(
            BackendSettings(instance_id, epoch, checksums), made or FakeDevice(), self.directory
        )
        self.devices.append(engine)
        return engine

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.devices: list[CudaTransferEngine] = []
        self._others = threads()

    async def close(self) -> None:
        await super().close()
        for engine in self.devices:
            await engine.close()
        await until(lambda: threads() <= self._others and num_mapped() == 0)
