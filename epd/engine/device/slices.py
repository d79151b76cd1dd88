"""A run of the vision tower in slices, between which the launch thread serves others.

Theory of operation
-------------------
Streams and images share one device, which does one thing at a time.  A batch of images takes tens
of milliseconds, and every stream would wait for all of it.  So a run of the tower is cut between
its layers into slices of a quantum, and before each the launch thread launches one step, if one is
queued.  One, not all: a step of few streams costs as much as one of many, and steps that take turns
among themselves would take the device from the images.  The thread first waits until only one
slice, of this run or the one before, is ahead of the device: a step waits for two at most.

How long a slice may be follows from what slices and the steps between them cost of late
(`SliceCost`), at start on one image as large as a batch.  Slices of a run are of one size.

Captured runs (`tower_graphs`) of several slices are recorded layer by layer, so that they can be
cut anywhere.

In a group every rank runs a part of a batch, with collectives only ahead of and behind it
(`shared_tower`).  So it does not matter where a rank's run is cut, but all must launch the same
steps before they join their rows.  The leader decides that (`groups/engines.py`): a batch has as
many *turns* as the largest share has slices, each a place in the order of commands.  A slice but
the first waits for a turn.  A rank with fewer slices, without an image or after a failure takes the
turns that are left before it joins; images that run again do so in the last.

Source: chunked prefill of Sarathi-Serve, for towers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from epd.engine.device.executor import DeviceExecutor
from epd.engine.device.stopwatch import Stopwatch
from epd.scheduling.slice_cost import SliceCost

HUNG_S = 60.0  # a device that does not come so far by then will not be helped by waiting


class Slices:
    """Of the towers of one engine, one run at a time."""

    def __init__(
        self,
        executor: DeviceExecutor,
        layers: Sequence[nn.Module],
        cost: SliceCost,
        *,
        is_led: bool = False,
    ) -> None:
        """`layers`: that each run calls in order.  `is_led`: this is a rank of a group."""
        self.cost = cost
        self.turns = 0  # that this batch has yet to take
        self._executor = executor
        self._new_watch = partial(Stopwatch, on_gpu=executor.streams is not None)
        self._num_layers = self._per_slice = len(layers)
        self._is_led = is_led
        self._of_run = (0, 0)  # patches, and those of its largest image
        self._layer = self._first = 0  # the next one, and that of the slice
        self._watch: Stopwatch | None = None  # of the slice
        self._ahead: threading.Event | None = None  # where the slice before the last ends
        self.on_cut: Callable[[], None] | None = None  # instead, while runs are recorded
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.next_layers(1))

    @contextlib.contextmanager
    def run(self, num_patches: int, largest: int) -> Iterator[None]:
        """Of so many patches, the largest image having `largest`."""
        num_slices = self.turns or self.cost.num_slices(num_patches, largest)
        if self.on_cut is not None and num_slices > 1:
            num_slices = self._num_layers
        self._per_slice = -(-self._num_layers // num_slices)
        self._of_run, self._layer, self._watch = (num_patches, largest), 0, None
        yield
        if self._watch is not None:
            self._end_slice()

    def end(self) -> None:
        """The batch has taken all its turns when this returns."""
        while self.turns:
            self._take_turn()

    def next_layers(self, count: int) -> None:
        """They are launched next: one, or all of a captured run."""
        if self._layer % self._per_slice == 0:
            self._cut()
        self._layer += count

    def _cut(self) -> None:
        if self.on_cut is not None:
            if self._layer:  # what is before the layers goes with the first of them
                self.on_cut()
            return
        passed = self._end_slice()
        if self._is_led:
            if self.turns and self._layer:
                self._take_turn()
        elif self.cost.quantum_s:
            before, self._ahead = self._ahead, passed
            if before is not None:
                before.wait(HUNG_S)
            self._let_in(self._executor.give_way)
        self._watch, self._first = self._new_watch(), self._layer

    def _end_slice(self) -> threading.Event:
        """Set when the device has passed all that is launched."""
        watch, self._watch = self._watch, None
        if watch is None:
            return self._executor.here()
        watch.stop()
        observe = partial(self.cost.observe, *self._of_run, self._layer - self._first)
        return self._executor.here(lambda: observe(watch.elapsed_s()))

    def _take_turn(self) -> None:
        self.turns -= 1
        self._let_in(self._executor.pause)

    def _let_in(self, steps: Callable[[], bool]) -> None:
        watch, observe = self._new_watch(), self.cost.between.observe
        if steps():
            watch.stop()
            self._executor.here(lambda: observe(1, watch.elapsed_s()))
