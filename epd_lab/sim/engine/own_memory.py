"""Faults in the memory of a simulated engine: raised when they are found, with the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.device import SimDevice

OnFound = Callable[[SimProcess, str], None]


class SimOwnMemory:
    """Its blocks, by the role that owns them."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.is_leased: Callable[[Sequence[int]], bool] = lambda blocks: True
        self.is_published: Callable[[int], bool] = lambda block: False
        self.on_found: OnFound = lambda process, text: None

    def found(self, text: str) -> None:
        self.on_found(self.device.process, text)

    def check_leased(self, what: str, blocks: Sequence[int]) -> None:
        if not self.is_leased(blocks):
            lost = [block for block in blocks if not self.is_leased((block,))]
            self.found(f"{what}: blocks {lost} had been given back")

    def check_private(self, what: str, blocks: Iterable[int]) -> None:
        if shared := sorted(filter(self.is_published, blocks)):
            self.found(f"{what}: wrote blocks {shared}, which others can find")
