"""A run of the vision tower in slices, between which the launch thread serves others.

Theory of operation
-------------------
Streams and images share one device, which does one thing at a time.  A batch of images takes
tens of milliseconds, and every stream would wait for all of it.  So a run of the tower is cut
between its layers into slices of a quantum, and before each the launch thread launches one step, if
one is queued.  One, not all: a step in which few streams decode costs as much as one in which many
do, and steps that take turns among themselves would take the device from the images.  And it
waits until only one slice is ahead of the device, of this run or of the run before, so that a step
waits for two at most.

What a layer costs is measured at start, on one image as large as a batch, whose patches are the
dearest.  Slices of a run are of one size, and none is longer than a quantum.

Captured runs (`tower_graphs`) are recorded in the same slices, a graph for each.

Source: chunked prefill of Sarathi-Serve, for towers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from epd.engine.executor import DeviceExecutor

HUNG_S = 60.0  # a device that does not come so far by then will not be helped by waiting


class Slices:
    """Of the towers of one engine, one run at a time."""

    def __init__(
        self, executor: DeviceExecutor, layers: Sequence[nn.Module], max_quantum_s: float
    ) -> None:
        """`layers`: called one after the other by each run; `max_quantum_s` 0: runs stay whole."""
        self._executor = executor
        self._num_layers = len(layers)
        self._quantum_s = max_quantum_s
        self._patch_s = 0.0  # of one layer
        self._per_slice = 0  # layers; 0: this run is not cut
        self._layer = 0
        self._ahead: threading.Event | None = None  # where the slice before the last ends
        self.on_cut: Callable[[], None] | None = None  # instead, while runs are recorded
        for layer in layers:
            layer.register_forward_pre_hook(self._before)

    def measured(self, num_patches: int, elapsed_s: float) -> None:
        """A whole run over one image took so long."""
        if self._num_layers:
            self._patch_s = elapsed_s / num_patches / self._num_layers

    @property
    def patch_s(self) -> float:
        """Of a whole run; 0: not measured."""
        return self._patch_s * self._num_layers

    def begin(self, num_patches: int) -> None:
        """The next run has so many patches."""
        self._layer, self._per_slice = 0, 0
        layer_s = self._patch_s * num_patches
        if self._quantum_s and layer_s:
            most = max(1, int(self._quantum_s / layer_s))  # layers
            num_slices = -(-self._num_layers // most)
            self._per_slice = -(-self._num_layers // num_slices)

    def cut(self) -> None:
        """A slice, or a part of a captured run, is launched next."""
        if not self._per_slice:
            return
        if self.on_cut is not None:
            if self._layer:  # what is before the layers goes with the first of them
                self.on_cut()
            return
        before, self._ahead = self._ahead, self._executor.here()
        if before is not None:
            before.wait(HUNG_S)
        self._executor.give_way()

    def _before(self, layer: nn.Module, arguments: Any) -> None:
        if self._per_slice and self._layer % self._per_slice == 0:
            self.cut()
        self._layer += 1
