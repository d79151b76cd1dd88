"""A run of the vision tower in slices, between which the launch thread serves others.

Theory of operation
-------------------
Streams and images share one device, which does one thing at a time.  A batch of images takes tens
of milliseconds, and every stream would wait for all of it.  So a run of the tower is cut between
its layers into slices of a quantum, and before each the launch thread launches one step, if one is
queued.  One, not all: a step of few streams costs as much as one of many, and steps that take turns
among themselves would take the device from the images.  The thread first waits until only one
slice, of this run or the one before, is ahead of the device: a step waits for two at most.

What a layer costs is measured at start, on one image as large as a batch, whose patches are the
dearest.  Slices of a run are of one size, and none is longer than a quantum.

Captured runs (`tower_graphs`) are recorded in the same slices, a graph for each.

In a group every rank runs a part of a batch, with collectives only ahead of and behind it
(`shared_tower`).  So it does not matter where a rank's run is cut, but all must launch the same
steps before they join their rows.  The leader decides that (`groups/engines.py`): a batch has as
many *turns* as the largest share has slices, each a place in the order of commands.  A slice but
the first waits for a turn.  A rank with fewer slices, without an image or after a failure takes the
turns that are left before it joins; one with more runs the rest in the last.

Source: chunked prefill of Sarathi-Serve, for towers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from epd.engine.device.executor import DeviceExecutor

HUNG_S = 60.0  # a device that does not come so far by then will not be helped by waiting


class Slices:
    """Of the towers of one engine, one run at a time."""

    def __init__(
        self,
        executor: DeviceExecutor,
        layers: Sequence[nn.Module],
        max_quantum_s: float,
        *,
        is_led: bool = False,
    ) -> None:
        """`layers`: called one after the other by each run; `max_quantum_s` 0: runs stay whole.
        `is_led`: this is a rank of a group."""
        self._executor = executor
        self._num_layers = len(layers)
        self._quantum_s = max_quantum_s
        self._is_led = is_led
        self._turns = 0  # that this batch has yet to take
        self._is_first = False  # the next slice is, of its run
        self._patch_s = 0.0  # of one layer
        self._per_slice = 0  # layers; 0: this run is not cut
        self._layer = 0
        self._ahead: threading.Event | None = None  # where the slice before the last ends
        self.on_cut: Callable[[], None] | None = None  # instead, while runs are recorded
        for layer in layers:
            layer.register_forward_pre_hook(self._before)

    def measured(self, num_patches: int, elapsed_s: float) -> None:
        if self._num_layers:
            self._patch_s = elapsed_s / num_patches / self._num_layers

    @property
    def patch_s(self) -> float:
        """Of a whole run; 0: not measured."""
        return self._patch_s * self._num_layers

    def begin(self, num_patches: int) -> None:
        self._layer, self._is_first = 0, True
        num_slices = self._turns or self.count(num_patches)
        self._per_slice = -(-self._num_layers // num_slices) if num_slices else 0

    def count(self, num_patches: int) -> int:
        """The slices of a run over so many patches; 0: it is not cut."""
        layer_s = self._patch_s * num_patches
        if not self._quantum_s or not layer_s:
            return 0
        most = max(1, int(self._quantum_s / layer_s))  # layers
        return -(-self._num_layers // most)

    def lead(self, num_turns: int) -> None:
        self._turns = num_turns

    def end(self) -> None:
        """The batch has taken all its turns when this returns."""
        while self._turns:
            self._take_turn()

    def cut(self) -> None:
        """A slice, or a part of a captured run, is launched next."""
        if not self._per_slice:
            return
        if self.on_cut is not None:
            if self._layer:  # what is before the layers goes with the first of them
                self.on_cut()
            return
        if self._is_led:
            if self._turns and not self._is_first:
                self._take_turn()
            self._is_first = False
            return
        before, self._ahead = self._ahead, self._executor.here()
        if before is not None:
            before.wait(HUNG_S)
        self._executor.give_way()

    def _take_turn(self) -> None:
        self._turns -= 1
        self._executor.pause()

    def _before(self, layer: nn.Module, arguments: Any) -> None:
        if self._per_slice and self._layer % self._per_slice == 0:
            self.cut()
        self._layer += 1
