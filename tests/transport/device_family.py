"""Owners and writers of a device's memory, here and in processes of their own."""

from __future__ import annotations

from epd.transport.backend import BackendSettings
from epd.transport.cuda import CudaTransferEngine
from tests.transport.fake_device import FakeDevice
from tests.transport.test_shm_processes import Family as ShmFamily


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

    async def close(self) -> None:
        await super().close()
        for engine in self.devices:
            await engine.close()
