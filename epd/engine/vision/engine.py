"""The vision tower of one device: batches of patches to embedding rows.

The caller decides what goes into a batch.  When a batch raises, its items run again one by one, so
that one bad image fails alone (fault F13).  Rows that are not finite fail their image too: they
would poison the answer.  Rows of an item are own memory: a cache that evicts one image gets its
bytes back.

On a CPU, patches are made on the pool and rows lie where the tower left them.  On a GPU the pool
only decodes; pixels go up as bytes and become patches there (`image_ops`).  Rows stay there, in an
arena, or come down into pinned memory when it is full, on a stream of their own, beside the next
step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.adapter_list import WithBank
from epd.engine.base import EncodeFailure, Patches, Rows, nothing
from epd.engine.device.executor import Deferred, DeviceExecutor
from epd.engine.device.row_memory import copied_out, tensor_of
from epd.engine.device.slices import HUNG_S, Slices
from epd.engine.sharding import WHOLE, Shard
from epd.engine.vision.image_pixels import MAX_PIXELS
from epd.engine.vision.preprocess import Preprocessor
from epd.messages import Clip, PixelBounds
from epd.model_files.geometry import image_geometry
from epd.scheduling.slice_cost import SliceCost
from epd.shares import most

if TYPE_CHECKING:
    from epd.engine.device.streams import DeviceStreams
    from epd.engine.language.graphs import PartsRecorder
    from epd.engine.vision.lora import TowerBank
    from epd.groups.device.shared_tower import Tower

MAX_SCALE = 128  # of the smallest image's sides
RUNS = 4  # of the largest image at start, to know what it costs
_Encoded = asyncio.Future[list[Rows | EncodeFailure]]
_Launched = tuple[torch.Tensor, torch.Tensor]  # rows and whether they are finite, on their way


class TorchVisionEngine(WithBank):
    bank: TowerBank | None
    _cut_run: _Encoded  # that takes turns
    _turns_left: int  # to be given to it

    def __init__(
        self,
        adapter: ModelAdapter,
        model: Any,
        executor: DeviceExecutor,
        dtype: torch.dtype = torch.float32,
        max_pixels: int = MAX_PIXELS,
        streams: DeviceStreams | None = None,
        max_quantum_s: float = 0.0,
        shard: Shard = WHOLE,
        device: str = "cpu",
        bank: TowerBank | None = None,
    ) -> None:
        self.model = model
        self.bank = bank
        self.contract = adapter.row_contract(dtype)
        self.max_batches = 2 if max_quantum_s else 1
        self._adapter = adapter
        self._dtype = dtype
        self._executor = executor
        self._streams = streams
        layers = adapter.tower_layers(model)
        self._new_cost = partial(SliceCost, len(layers), max_quantum_s, time.monotonic)
        self._slices = Slices(executor, layers, self._new_cost(), is_led=shard.size > 1)
        self._preprocess = Preprocessor(adapter, max_pixels, on_device=streams is not None)
        self._shard = shard
        self._largest: tuple[list[Patches], ...] = ()  # batches, set by `warm_up`
        self._tower: Tower = self._rows_of
        if shard.size > 1:
            from epd.groups.device.shared_tower import SharedTower

            width = self.contract.row_width
            end = self._slices.end
            self._tower = SharedTower(self._rows_of, self._upload, end, shard, width, dtype, device)

    def reserve(self, device_nbytes: int, host_nbytes: int) -> None:
        """Memory for rows that are kept, before the plan of the device shares out the rest: on the
        device, and pinned.  A quarter of the first besides, for what others still read, and as much
        pinned for what is on its way to them.  Nothing on a CPU."""
        if self._streams is not None:
            from epd.engine.device.pinned import Arena

            on_its_way = device_nbytes // 4
            self._streams.rows = Arena(device_nbytes + on_its_way, self._streams.device)
            self._streams.arena = Arena(host_nbytes + on_its_way)

    def take_films(self, nbytes: int) -> None:
        """Films are decoded on the device from now on, in so much of its memory, where it can."""
        self._preprocess.films = None
        if nbytes and self._streams is not None and self._preprocess.video_ops is not None:
            from epd.engine.vision.film_device import film_device

            self._preprocess.films = film_device(self._streams.device, nbytes)

    @property
    def films_nbytes(self) -> int:
        """Of the device's memory, taken by films as they come; 0: the CPU decodes them."""
        films = self._preprocess.films
        return 0 if films is None else films.nbytes

    @property
    def patch_s(self) -> float:
        return self._slices.cost.patch_s if self._largest else 0.0

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        """Between batches, never between the slices of one."""
        assert self.bank is not None
        return self._executor.launch_long(self.bank.change, dropped, held)

    async def preprocess(
        self,
        image: Any,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        work = image, grid_thw, clip, bounds
        return await self._executor.compute_in_turn(on_begin, self._preprocess, *work)

    def num_turns(self, batch: Sequence[Patches]) -> int:
        """Of a group with this batch: the slices of the largest share; 0: it is not cut."""
        share = most([p.num_patches for p in batch], self._shard.size)
        count = self._slices.cost.num_slices(share, _largest(batch))
        return count if count > 1 else 0

    def encode(
        self, batch: Sequence[Patches], num_turns: int = 0
    ) -> Awaitable[list[Rows | EncodeFailure]]:
        """Rows or a failure per item, in order; the items share one run of the tower.  At the ranks
        of a group behind the first, nothing: rows are the first one's.

        With turns, which a group alone has: nothing, as soon as the device begins.  So many calls
        of `go_on` follow; the last one gives the rows."""
        begun: _Encoded | None = self._executor.launch_brief(list) if num_turns else None
        run: _Encoded = self._executor.launch_long(self._encode, list(batch), num_turns)
        if begun is None:
            return run
        self._cut_run, self._turns_left = run, num_turns
        return begun

    def go_on(self) -> Awaitable[list[Rows | EncodeFailure]]:
        """The batch takes a turn; done when the device has passed what was launched before it."""
        begun = self._executor.go_on()
        self._turns_left -= 1
        if self._turns_left:
            return begun
        run = self._cut_run
        del self._cut_run  # and with it the rows, once they are forgotten elsewhere
        return run

    async def to_host(self, rows: Rows) -> Rows:
        if self._streams is None or rows.on_host:
            return rows
        tensor = await self._executor.compute(self._streams.moved_down, rows.tensor)
        return replace(rows, tensor=tensor)

    async def to_device(self, rows: Rows) -> Rows:
        """See `VisionEngine.to_device`; these, too, where the device has no room."""
        if self._streams is None or not rows.on_host:
            return rows
        host = tensor_of(rows, self._dtype)
        tensor = await self._executor.compute(self._streams.moved_up, host)
        return rows if tensor is None else replace(rows, tensor=tensor)

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        await self._executor.compute(copied_out, await self.to_host(rows), views)

    def warm_up(self, num_patches: int = 0) -> None:
        """First touch of weights, code and the memory of the largest batch; measures a layer's
        time.  Runs a small image, then as many patches as a batch may have, as many images and as
        one."""
        smallest = self._image(1)
        self._run([smallest] * self._shard.size)
        if count := num_patches // smallest.num_patches:
            largest = self._image(self._scale_of(num_patches))
            self._largest = ([smallest] * count, [largest])
            self.touch()
            self._slices.cost = self._new_cost()  # without runs that compile
            for _ in range(RUNS):
                self._run([largest] * self._shard.size)
            self._executor.here().wait(HUNG_S)  # they are seen by then

    def touch(self) -> None:
        """Take the memory of the largest batch again, or a plan would miss it: torch's allocator
        gives it back where graphs are captured or weights are laid side by side."""
        for batch in self._largest:
            self._run(batch * self._shard.size)

    def capture(self, record: PartsRecorder, max_patches: int) -> None:
        with torch.inference_mode():
            self._adapter.capture_vision(self.model, max_patches, record, self._slices)

    def _image(self, scale: int) -> Patches:
        from PIL import Image

        width, height = self._adapter.smallest_image()
        return self._preprocess.patches(Image.new("RGB", (scale * width, scale * height)))

    def _scale_of(self, num_patches: int) -> int:
        """Of the image with most patches that has not more.  Small ones are enlarged before they
        are cut into patches, so an image's size alone does not decide."""
        checkpoint = self._adapter.checkpoint
        width, height = self._adapter.smallest_image()

        def patches(scale: int) -> int:
            size = (scale * width, scale * height)
            count = image_geometry(checkpoint.config, checkpoint.preprocessor, *size).num_patches
            return count if count <= num_patches else 0

        return max(range(1, MAX_SCALE), key=patches)

    def _encode(
        self, batch: list[Patches], num_turns: int = 0
    ) -> Deferred[list[Rows | EncodeFailure]]:
        self._slices.turns = num_turns
        launched: list[_Launched | EncodeFailure] = []
        try:
            launched += self._run(batch) if batch else []
        except Exception as error:  # any item may be to blame
            if self._shard.size > 1:
                raise  # the other ranks are not there for a second run
            alone = len(batch) == 1
            launched = [_failure(error)] if alone else [self._encode_alone(p) for p in batch]

        def finish() -> list[Rows | EncodeFailure]:
            return [item if isinstance(item, EncodeFailure) else _rows(*item) for item in launched]

        if self._streams is None or not launched:
            return Deferred(finish)
        from epd.engine.device.streams import DOWNLOAD

        return Deferred(finish, DOWNLOAD)

    def _encode_alone(self, patches: Patches) -> _Launched | EncodeFailure:
        try:
            return self._run([patches])[0]
        except Exception as error:  # this item is to blame
            return _failure(error)

    def _run(self, batch: list[Patches]) -> list[_Launched]:
        with torch.inference_mode():
            rows = self._tower(batch)
            expected = sum(patches.num_rows for patches in batch)
            if rows.shape != (expected, self.contract.row_width):
                raise ValueError(
                    f"the tower gave {tuple(rows.shape)} where "
                    f"{(expected, self.contract.row_width)} was expected"
                )
            if self._shard.rank:
                return []
            return [self._own(part) for part in rows.split([patches.num_rows for patches in batch])]

    def _rows_of(self, batch: Sequence[Patches]) -> torch.Tensor:
        """Of images that this rank has, in order."""
        with self._slices.run(sum(patches.num_patches for patches in batch), _largest(batch)):
            on_device = [self._on_device(patches) for patches in batch]
            if self.bank is not None:
                self.bank.begin_batch(batch)
            return self._adapter.encode(self.model, on_device, self._dtype)

    def _upload(self, pixels: torch.Tensor) -> torch.Tensor:
        """These, where they are on the device."""
        return pixels if self._streams is None or pixels.is_cuda else self._streams.upload(pixels)

    def _on_device(self, patches: Patches) -> Patches:
        if self._streams is None:
            return patches
        pixels = self._upload(patches.pixels)
        if pixels.dtype == torch.uint8:
            ops: Any = self._preprocess.ops_of(pixels)
            pixels = ops.patches(pixels, patches.grid_thw, self._dtype)
        return replace(patches, pixels=pixels)

    def _own(self, part: torch.Tensor) -> _Launched:
        finite = torch.isfinite(part.sum(dim=-1, dtype=torch.float32)).all()
        part = part.to(self._dtype)
        if self._streams is None:
            return part.contiguous().clone(), finite
        rows = self._streams.stay(part)
        if rows is None:
            rows = self._streams.download(part)
        return rows, self._streams.download(finite)


def _rows(rows: torch.Tensor, finite: torch.Tensor) -> Rows | EncodeFailure:
    if not bool(finite):
        return EncodeFailure("the vision tower gave values that are not finite")
    return Rows(rows, rows.shape[0], rows.numel() * rows.element_size())


def _largest(batch: Sequence[Patches]) -> int:
    """Patches that attend to one another, at most."""
    return max(patches.num_patches // patches.grid_thw[0] for patches in batch)


def _failure(error: Exception) -> EncodeFailure:
    return EncodeFailure(f"the vision tower failed: {type(error).__name__}: {error}")
