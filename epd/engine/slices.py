"""A run of the vision tower in slices, between which the launch thread serves others.

Theory of operation
-------------------
Streams and pictures share one device, which does one thing at a time.  A batch of pictures takes
tens of milliseconds, and every stream would wait for all of it.  So a run of the tower is cut
between its layers.  At each cut the launch thread looks whether the last step was launched a
quantum ago, and if so launches those that have been queued; else the run goes on: a step in which
few streams decode costs as much as one in which many do, so steps that come too often would take
the device from the pictures.  And it waits until only one slice is ahead of the device, so that
what a step waits for is a quantum and two slices, each a quarter of one.

What a layer costs is measured at start, on the largest picture, whose patches are the dearest.

Source: chunked prefill of Sarathi-Serve, for towers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import nn

from epd.engine.executor import DeviceExecutor

PER_QUANTUM = 4  # slices
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
        for layer in layers:
            layer.register_forward_pre_hook(self._before)

    def measured(self, num_patches: int, elapsed_s: float) -> None:
        """A whole run over one picture took so long."""
        if self._num_layers:
            self._patch_s = elapsed_s / num_patches / self._num_layers

    def begin(self, num_patches: int) -> None:
        """The next run has so many patches."""
        self._layer, self._ahead, self._per_slice = 0, None, 0
        layer_s = self._patch_s * num_patches
        if self._quantum_s and layer_s:
            self._per_slice = max(1, int(self._quantum_s / PER_QUANTUM / layer_s))

    def _before(self, layer: nn.Module, arguments: Any) -> None:
        if self._per_slice and self._layer and self._layer % self._per_slice == 0:
            before, self._ahead = self._ahead, self._executor.here()
            if before is not None:
                before.wait(HUNG_S)
            self._executor.give_way(self._quantum_s)
        self._layer += 1
