"""The simulated planes pass the contract kits of their ports, on virtual time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from epd.messages import Address
from epd.transport.base import Bus, TransferEngine
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.core.rand import KeyedRandom, draw
from epd_lab.sim.planes.network import Conditions, Network, SimBus
from epd_lab.sim.planes.transfer import DataConditions, Fabric, SimTransferEngine
from tests.contract.bus_kit import BUS_CHECKS
from tests.contract.bus_kit import name_of as bus_name_of
from tests.contract.transfer_kit import (
    DOUBT_CHECKS,
    TRANSFER_CHECKS,
    Doubt,
    pattern,
    sixty_four_mib,
)
from tests.contract.transfer_kit import name_of as transfer_name_of


def no_trace(*event: object) -> None:
    """Contract checks need none."""


class SimNet:
    def __init__(self, loop: SimLoop) -> None:
        self.network = Network(loop, KeyedRandom(1), no_trace, Conditions())
        self._pids = itertools.count(1)

    def make(self, instance_id: str, epoch: int = 1, *, max_queue: int = 1000) -> Bus:
        self.network.conditions = Conditions(max_queue=max_queue)
        return SimBus(self.network, SimProcess(instance_id, epoch, next(self._pids)))


class SimMemory:
    def __init__(self, loop: SimLoop, kind: str) -> None:
        conditions = DataConditions(kind=kind, nbytes_per_s=1e9)
        self.loop = loop
        self.fabric = Fabric(loop, KeyedRandom(1), no_trace, conditions)

    def engine(self, instance_id: str, epoch: int = 1) -> TransferEngine:
        return SimTransferEngine(self.fabric, SimProcess(instance_id, epoch, 1))

    async def dead_peer(self) -> tuple[Address, str, int]:
        process = SimProcess("dead", 1, 77)
        SimTransferEngine(self.fabric, process)
        self.loop.kill(process)
        self.fabric.process_died(process)
        return Address("dead", 1, ""), "sim", 77

    async def doubt(self) -> Doubt:
        """Reported early; the writer dies, and a card would move the rest for a while."""
        self.fabric.conditions = DataConditions(
            kind=self.fabric.conditions.kind, unknown=1.0, linger_s=1.0, num_pieces=5
        )
        process = SimProcess("writer", 3, 78)
        writer = SimTransferEngine(self.fabric, process)
        owner = self.engine("owner")
        region = owner.allocate("pool", 1, 100_000)
        outcome = await writer.write([pattern(100_000)], region.remote, (0,))
        address = (Address("writer", 3, ""), "sim", 78)
        assert not await owner.fence(*address), "silence is no fence"
        self.loop.kill(process)
        self.fabric.process_died(process)
        return Doubt(outcome, owner, region, address, lambda: None)


@pytest.mark.parametrize("check", BUS_CHECKS, ids=bus_name_of)
def test_bus_contract(check: Any) -> None:
    loop = SimLoop()
    loop.run_until_complete(check(SimNet(loop)))
    loop.freeze()


# This one waits for time to pass by spinning; virtual time stands still while callbacks run.
CHECKS = [c for c in TRANSFER_CHECKS if c.__name__ != "the_loop_runs_on_during_a_big_write"]


@pytest.mark.parametrize("kind", ["shm", "rdma"])
@pytest.mark.parametrize("check", CHECKS, ids=transfer_name_of)
def test_transfer_contract(check: Any, kind: str) -> None:
    loop = SimLoop()
    memory = SimMemory(loop, kind)
    loop.run_until_complete(check(memory))
    assert not [write for write in memory.fabric.writes if not write.ended], "a write leaked"
    loop.freeze()


@pytest.mark.parametrize("kind", ["shm", "rdma"])
@pytest.mark.parametrize("check", DOUBT_CHECKS, ids=transfer_name_of)
def test_transfer_contract_of_doubt(check: Any, kind: str) -> None:
    loop = SimLoop()
    loop.run_until_complete(check(SimMemory(loop, kind)))
    loop.freeze()


@pytest.mark.parametrize("check", [sixty_four_mib], ids=transfer_name_of)
def test_transfer_contract_with_big_buffers(check: Any) -> None:
    loop = SimLoop()
    loop.run_until_complete(check(SimMemory(loop, "shm")))
    loop.freeze()


def test_draws_depend_on_their_key_alone() -> None:
    assert draw(7, "loss", "e0", 3) == draw(7, "loss", "e0", 3)
    assert len({draw(seed, stream, n) for seed in (1, 2) for stream in "ab" for n in (1, 2)}) == 8
    values = [draw(3, "uniform", n) for n in range(2000)]
    assert 0.47 < sum(values) / 2000 < 0.53 and min(values) < 0.01 and max(values) > 0.99
