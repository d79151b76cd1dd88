"""How long a slice of a vision tower's run may be, by what slices and steps cost of late.

A slice holds up streams, and the step between two slices holds up images.  So a slice ends within a
quantum, or within SHARE of the steps between, where that is longer.  Else images would have an
eleventh of the device beside steps of ten quanta; so they have a fifth.

A patch costs more in a larger image.  So its cost is followed for each power of two of an image's
size.  A size that was not seen yet costs what the largest one does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from epd.scheduling.step_cost import Rate

SHARE = 0.25  # of a step


class SliceCost:
    """Of a tower whose layers cost the same; seconds.  `max_quantum_s` 0: runs stay whole."""

    def __init__(self, num_layers: int, max_quantum_s: float, now_s: Callable[[], float]) -> None:
        self._num_layers = num_layers
        self._quantum_s = max_quantum_s
        self.between = Rate(now_s)  # two slices, steps were let in
        self._layers = defaultdict[int, Rate](partial(Rate, now_s))  # of a patch, by image's size

    def observe(self, num_patches: int, largest: int, num_layers: float, elapsed_s: float) -> None:
        """Layers of a run took so long; the largest of its images has `largest` patches."""
        self._layers[largest.bit_length()].observe(round(num_patches * num_layers), elapsed_s)

    @property
    def quantum_s(self) -> float:
        """Of a slice."""
        step_s = self.between.unit_s if self._quantum_s and self.between.is_sure else 0.0
        return max(self._quantum_s, SHARE * step_s)

    @property
    def patch_s(self) -> float:
        """Of a whole run, in the largest images; 0: not measured."""
        return self._layers[max(self._layers, default=0)].unit_s * self._num_layers

    def num_slices(self, num_patches: int, largest: int) -> int:
        """Of a run, at least one."""
        rate = self._layers.get(largest.bit_length())
        run_s = num_patches * (rate.unit_s * self._num_layers if rate else self.patch_s)
        layers = int(self.quantum_s * self._num_layers / run_s) if run_s else 0
        return -(-self._num_layers // max(1, layers)) if self._quantum_s and run_s else 1
