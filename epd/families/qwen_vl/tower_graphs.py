"""Captured runs of a tower: a launch, or one for each layer, instead of three hundred.

Theory of operation
-------------------
A small image takes less time on the device than launching its kernels takes on the host.  Under
load the host is late for large ones, too: threads that decode images hold the interpreter.  So runs
are captured once for some numbers of patches; one is then a copy of what it reads into the next
larger shape, and replays.  Padding belongs to no segment: attention writes no row of it.
Everything else in a tower looks at one patch, or the patches of one row, at a time.

A run that may be cut into slices (`slices`) is captured as its layers, one graph each, since how
long slices are follows what they cost.  What one graph leaves for the next lies in memory that all
share: no other run comes between them.

Where adapters may change the tower, runs with them are captured beside those without.

Runs of more segments than there is room for, and towers with windows, stay as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.device.copies import upload
from epd.engine.device.slices import Slices
from epd.engine.language.graphs import OnePlace, PartsRecorder
from epd.engine.vision.segments import SegmentAttention
from epd.engine.vision.tower import Grid, run, tower_inputs

if TYPE_CHECKING:
    from epd.engine.vision.lora import TowerBank

STEP = 128  # between the sizes: what pads is computed, too
MAX_SEGMENTS = 16


class TowerGraphs:
    """Of one tower; on the launch thread."""

    def __init__(
        self,
        visual: Any,
        pixels: torch.Tensor,
        max_patches: int,
        record: PartsRecorder,
        slices: Slices,
    ) -> None:
        """`pixels`: of one row's patches; `slices`: of this tower."""
        self._visual = visual
        attention = visual.blocks[0].attn
        self._attend: SegmentAttention = attention.attend
        self._head_dim = attention.qkv.out_features // 3 // attention.num_heads
        self._slices = slices
        self._device = pixels.device
        self._merged = len(pixels)  # patches of a row
        most = max(1, max_patches // STEP) * STEP
        self._sizes = range(STEP, most + 1, STEP)
        side = round(self._merged**0.5)
        given = tower_inputs(visual, [(1, side, side)], self._device)
        del given["cu_seqlens"]
        self._pixels = pixels.new_zeros(most, pixels.shape[1])
        self._inputs = {name: t.new_zeros(most, *t.shape[1:]) for name, t in given.items()}
        self._bank: TowerBank | None = getattr(attention.qkv, "bank", None)
        self._places = torch.zeros(most // self._merged, dtype=torch.int32, device=self._device)
        self._ops = self._attend.kernels(pixels.new_empty(1, attention.qkv.out_features))
        self._segments = self._list([0], most).to(self._device)
        self._rows = OnePlace()
        slices.on_cut = record.cut
        self._graphs = {
            (size, adapts): record.parts(partial(self._run, size, adapts=adapts))
            for size in reversed(self._sizes)
            for adapts in ((False,) if self._bank is None else (False, True))
        }
        slices.on_cut = None

    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor | None:
        """Rows of all images; None: no graph fits."""
        at = bisect_left(self._sizes, len(pixels))
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        given = tower_inputs(self._visual, grids, self._device)
        bounds = given.pop("cu_seqlens").tolist()
        segments = self._list(bounds, size)
        if segments is None:
            return None
        of_rows = pixels.view(-1, self._merged * pixels.shape[1])
        places = None if self._bank is None else self._bank.places_of(of_rows)
        parts, rows = self._graphs[size, places is not None]
        num_layers = len(self._visual.blocks) // len(parts)  # of each
        self._slices.next_layers(num_layers)
        self._segments[: len(segments)].copy_(upload(segments, self._device))
        self._pixels[: len(pixels)].copy_(pixels)
        if places is not None:
            self._places[: len(places)].copy_(places)
            self._places[len(places) :] = -1  # what pads has none
        for name, tensor in given.items():
            self._inputs[name][: len(tensor)].copy_(tensor)
        parts[0]()
        for part in parts[1:]:
            self._slices.next_layers(num_layers)
            part()
        return rows[: len(pixels) // self._merged].clone()  # the next replay writes there

    def _run(self, size: int, *, adapts: bool) -> torch.Tensor:
        if self._bank is not None:
            count = size // self._merged
            places = self._places[:count] if adapts else None
            self._bank.begin_run(places, [self._merged] * count)
        bounds = torch.tensor([0, size], dtype=torch.int32)
        self._attend.preset(bounds, self._segments[: len(self._list([0], size))])
        inputs = {name: tensor[:size] for name, tensor in self._inputs.items()}
        inputs["cu_seqlens"] = bounds
        with self._slices.run(size, size):
            return self._rows(run(self._visual, self._pixels[:size], [(1, 1, size)], inputs))

    def _list(self, bounds: list[int], size: int) -> Any:
        """As the kernel reads them, in the room of a size; None: there is none."""
        return self._ops.list_segments(bounds, self._head_dim, (size, MAX_SEGMENTS))
