"""Captured runs of a tower give the rows that it gives itself; the recorder only plays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from epd.engine.base import Rows
from epd.engine.kernels import torch_ops
from epd.engine.vision.segments import SegmentAttention
from epd.families.qwen_vl.tower_graphs import MAX_SEGMENTS, STEP
from epd.scheduling.slice_cost import SliceCost
from tests.engine.conftest import drawn_image
from tests.engine.driver import Driver, expand, png

GARBAGE = float("nan")  # in rows of no segment


class Garbled:
    """The specification, which leaves anything where no segment is."""

    list_segments = staticmethod(torch_ops.list_segments)

    @staticmethod
    def attend_segments(qkv: torch.Tensor, segments: torch.Tensor, scaling: float) -> torch.Tensor:
        out = torch_ops.attend_segments(qkv, segments, scaling)
        out[int(segments[-1]) :] = GARBAGE
        return out


class Played:
    """Runs a call again as a whole, as the last of its parts."""

    def __init__(self) -> None:
        self.cuts = 0

    def cut(self) -> None:
        self.cuts += 1

    def parts(
        self, call: Callable[[], torch.Tensor]
    ) -> tuple[list[Callable[[], None]], torch.Tensor]:
        self.cuts = 0
        result = call()

        def again() -> None:
            result.copy_(call())

        return [lambda: None] * self.cuts + [again], result


def capture(vision: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its tower."""
    monkeypatch.setattr(SegmentAttention, "is_tiled", lambda self, qkv: True)
    monkeypatch.setattr(SegmentAttention, "kernels", lambda self, qkv: Garbled)
    vision.capture(Played(), 3 * STEP)
    return vision.model.model.visual


@pytest.fixture
def captured(
    driver: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    def make(family: str) -> Any:
        return capture(driver(family).vision, monkeypatch)

    return make


async def rows_of(serving: Driver, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    images = [drawn_image(seed, *size) for seed, size in enumerate(sizes)]
    parts = [{"type": "image"} for _ in images]
    _, layouts = expand(serving.model_dir, [{"role": "user", "content": parts}], images)
    vision: Any = serving.vision
    patches = [
        await vision.preprocess(png(image), layout.grid_thw)
        for image, layout in zip(images, layouts, strict=True)
    ]
    found = await vision.encode(patches)
    assert all(isinstance(rows, Rows) for rows in found)
    return [rows.tensor for rows in found]


BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((120, 90), (64, 64)),
    ((64, 64),),  # behind a larger one: what that left must not be read
    ((33, 70), (80, 40), (64, 64)),
)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "paddleocr_vl"])
async def test_rows_are_the_towers_own(
    family: str, driver: Callable[[str], Driver], captured: Callable[[str], Any]
) -> None:
    serving = driver(family)
    expected = [await rows_of(serving, sizes) for sizes in BATCHES]
    visual = captured(family)
    assert list(visual.graphs._sizes) == [STEP, 2 * STEP, 3 * STEP]
    assert len({rows.data_ptr() for _, rows in visual.graphs._graphs.values()}) == 1
    forward = visual.forward
    runs: list[int] = []

    def counted(pixels: torch.Tensor, **inputs: Any) -> Any:
        runs.append(len(pixels))
        return forward(pixels, **inputs)

    visual.forward = counted
    try:
        for sizes, wanted in zip(BATCHES, expected, strict=True):
            with torch.inference_mode():
                visual.graphs._pixels.fill_(GARBAGE)
            for found, rows in zip(await rows_of(serving, sizes), wanted, strict=True):
                torch.testing.assert_close(found, rows, atol=1e-5, rtol=1e-4)
        assert runs and all(length % STEP == 0 for length in runs), "all were padded"
        runs.clear()
        many = await rows_of(serving, [(32, 32)] * (MAX_SEGMENTS * 3 + 1))
        assert len(many) == MAX_SEGMENTS * 3 + 1 and runs[-1] % STEP, "too many segments"
        await rows_of(serving, [(400, 400)] * 3)
        assert runs[-1] > 3 * STEP, "too large"
    finally:
        del visual.forward
        del visual.graphs


async def test_runs_are_captured_by_layer_and_cut_by_what_they_cost_now(
    driver: Callable[[str], Driver], captured: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for each layer; one where a run is shorter than a quantum."""
    serving = driver("qwen3_vl")
    slices = serving.vision._slices  # type: ignore[union-attr]
    num_layers = slices._num_layers
    assert num_layers > 1
    expected = await rows_of(serving, BATCHES[0])
    cost = SliceCost(num_layers, 1.0, lambda: 0.0)
    cost.observe(STEP, STEP, num_layers, 0.9)
    monkeypatch.setattr(slices, "cost", cost)
    visual = captured("qwen3_vl")
    order: list[str] = []
    seen: list[float] = []
    try:
        graphs = visual.graphs._graphs
        numbers = {size: len(parts) for (size, _), (parts, _) in graphs.items()}
        assert numbers == {STEP: 1, 2 * STEP: num_layers, 3 * STEP: num_layers}
        monkeypatch.setattr(slices._executor, "give_way", lambda: order.append("way"))
        monkeypatch.setattr(slices, "on_cut", lambda: None)  # the player's call is not cut again
        found = await rows_of(serving, BATCHES[0])
        assert not order, "nothing gives way to others while a run is recorded"
        monkeypatch.setattr(slices, "on_cut", None)
        monkeypatch.setattr(cost, "observe", lambda *told: seen.append(told[2]))
        for size, (parts, rows) in graphs.items():
            graphs[size] = ([partial(order.append, "graph")] * len(parts), rows)
        for count in (num_layers, 1):
            monkeypatch.setattr(cost, "num_slices", lambda *_, count=count: count)
            await rows_of(serving, BATCHES[0])
        ways = ["way", "graph"] * num_layers, ["way", *["graph"] * num_layers]
        assert order == [*ways[0], *ways[1]]
        assert seen == [*[1] * num_layers, num_layers]
        seen.clear()
        await rows_of(serving, BATCHES[1])
        assert seen == [num_layers], "of one graph"
    finally:
        del visual.graphs
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-4)


async def test_windows_are_not_captured(
    driver: Callable[[str], Driver], captured: Callable[[str], Any]
) -> None:
    assert not hasattr(captured("qwen2_5_vl"), "graphs")
