"""A run of the vision tower in slices, between which the launch thread serves others.

Theory of operation
-------------------
Streams and pictures share one device, which does one thing at a time.  A batch of pictures takes
tens of milliseconds, and every stream would wait for all of it.  So a run of the tower is cut
between its layers into slices of at most a quantum.  At each cut the launch thread runs what others
have queued meanwhile (steps), and waits until the device has come so far that only one slice is
ahead of it: then a step waits for two slices at most, and the device for nobody.

What a layer costs is measured at start, on the largest picture, whose patches are the dearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from epd.engine.executor import DeviceExecutor, Mark


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
        self._mark: Mark | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._before)

    def measured(self, num_patches: int, elapsed_s: float) -> None:
        """A whole run over one picture took so long."""
        if self._num_layers:
            self._patch_s = elapsed_s / num_patches / self._num_layers

    def begin(self, num_patches: int) -> None:
        """The next run has so many patches."""
        self._layer, self._mark, self._per_slice = 0, None, 0
        layer_s = self._patch_s * num_patches
        if self._quantum_s and layer_s:
            self._per_slice = max(1, int(self._quantum_s / layer_s))

    def _before(self, layer: nn.Module, arguments: Any) -> None:
        if self._per_slice and self._layer and self._layer % self._per_slice == 0:
            self._mark = self._executor.give_way(self._mark)
        self._layer += 1
