"""A minimal serving loop over the two engines: what the roles do, without messages or machines.

Each request is prefilled in chunks and decoded, all requests together in mixed batches, from KV
blocks handed out in a scattered order.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd.engine.base import MediaLayout, RopePositions, RowSpan, StepSequence
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.vision.engine import TorchVisionEngine
from epd.layouts import PASSED
from epd.messages import SamplingParams, TokenLogprobs
from epd.model_files.checkpoint import read_config, read_preprocessor
from epd.model_files.geometry import image_geometry, images_of
from epd.roles.steps.pictures import uncut
from tests.engine.reference import Messages, image_token, placeholder, render


def png(image: Any) -> bytes:
    """A PIL image as PNG bytes (lossless, so that the reference sees the same pixels)."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@dataclass
class Request:
    """One request in flight."""

    name: str
    token_ids: list[int]  # prompt, placeholders expanded
    layouts: list[MediaLayout]
    rows: list[Any]  # per image: Rows, or list of byte views
    rope: RopePositions
    blocks: list[int] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=16))
    computed: int = 0
    output: list[TokenLogprobs] = field(default_factory=list)
    draft: Callable[[list[int]], Sequence[int]] = lambda output: ()  # of what it says next
    num_steps: int = 0
    sees_both_ways: bool = False  # its pictures: no chunk cuts one

    @property
    def output_ids(self) -> list[int]:
        return [token.token_id for token in self.output]

    @property
    def finished(self) -> bool:
        ended = bool(self.output) and self.output[-1].token_id in self.sampling.stop_token_ids
        return ended or len(self.output) >= self.sampling.max_tokens

    def next_step(self, chunk: int) -> StepSequence:
        """The next chunk of the prompt, or the last output token."""
        prompt = len(self.token_ids)
        common = {
            "request_id": self.name,
            "block_table": self.blocks,
            "rope_delta": self.rope.delta,
            "prompt_ids": self.token_ids,
            "output_ids": self.output_ids,
            "output_index": len(self.output),
        }
        if self.computed >= prompt:
            drafts = self.draft(self.output_ids)[: self.sampling.max_tokens - len(self.output) - 1]
            ids = [self.output[self.computed - prompt].token_id, *drafts]
            return StepSequence(
                token_ids=ids,
                start=self.computed,
                positions=None,
                sample=self.sampling,
                num_drafts=len(drafts),
                **common,
            )
        stop = min(prompt, self.computed + chunk)
        if self.sees_both_ways:
            runs = [run for layout in self.layouts for _, run in self._runs(layout)]
            pictures = [(at, at + count) for at, count in runs]
            stop = self.computed + uncut(self.computed, stop - self.computed, pictures)
        positions = self.rope.positions
        return StepSequence(
            token_ids=self.token_ids[self.computed : stop],
            start=self.computed,
            positions=None if positions is None else positions[:, self.computed : stop],
            spans=list(self._spans(self.computed, stop)),
            sample=self.sampling if stop == prompt else None,
            **common,
        )

    def _spans(self, start: int, stop: int) -> Iterable[RowSpan]:
        for layout, rows in zip(self.layouts, self.rows, strict=True):
            for first_row, (at, count) in self._runs(layout):
                low, high = max(start, at), min(stop, at + count)
                if low < high:
                    left = at + count - high
                    yield RowSpan(low - start, first_row + low - at, high - low, rows, left)

    def _runs(self, layout: MediaLayout) -> Iterable[tuple[int, tuple[int, int]]]:
        """The first row of each run of its placeholders, where it begins and how long it is."""
        token, at, row = self.token_ids[layout.offset], layout.offset, 0
        while row < layout.num_rows:
            at = self.token_ids.index(token, at)
            stop = at
            while row + stop - at < layout.num_rows and self.token_ids[stop] == token:
                stop += 1
            yield row, (at, stop - at)
            row, at = row + stop - at, stop


def expand(
    model_dir: Path, prompt: Messages | Sequence[int], images: Sequence[Any]
) -> tuple[list[int], list[MediaLayout]]:
    """Token ids with every placeholder expanded, and where the images stand."""
    chat = bool(prompt) and isinstance(prompt[0], dict)
    config, settings = read_config(model_dir), read_preprocessor(model_dir)
    found = [image_geometry(config, settings, *image.size) for image in images]
    tile_text = kinds.tile_text if (kinds := images_of(config)) else None
    texts = []
    if tile_text:
        place = placeholder(model_dir)
        texts = [tile_text(geometry.tiles, place) for geometry in found]
    ids = render(model_dir, prompt, images=texts) if chat else list(prompt)  # type: ignore[arg-type]
    runs = [(i, geometry) for geometry in found for i in range(geometry.num_runs)]
    expanded: list[int] = []
    layouts: list[MediaLayout] = []
    for token_id in ids:
        if not images or token_id != image_token(model_dir):
            expanded.append(token_id)
            continue
        index, geometry = runs.pop(0)
        if not index:
            layouts.append(MediaLayout(len(expanded), geometry.num_rows, geometry.grid_thw))
        expanded += [token_id] * (geometry.num_rows // geometry.num_runs)
    return expanded, layouts


def end_tokens(model_dir: Path) -> tuple[int, ...]:
    return tuple(json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"])


class Driver:
    """Both engines of one model and the requests on them."""

    def __init__(
        self, model_dir: Path, vision: TorchVisionEngine | None, language: TorchLanguageEngine
    ) -> None:
        self.model_dir = model_dir
        self.vision = vision
        self.language = language
        # Scattered on purpose: a block table that happens to be contiguous hides indexing errors.
        self.free = sorted(range(language.num_blocks), key=lambda block: block * 7919 % 1009)

    async def request(
        self,
        name: str,
        prompt: Messages | Sequence[int],
        images: Sequence[Any] = (),
        **sampling: Any,
    ) -> Request:
        """Encode the images and lay out the prompt."""
        token_ids, layouts = expand(self.model_dir, prompt, images)
        rows: list[Any] = []
        if images:
            assert self.vision is not None
            patches = [
                await self.vision.preprocess(png(image), layout.grid_thw)
                for image, layout in zip(images, layouts, strict=True)
            ]
            rows = list(await self.vision.encode(patches))
        rope = self.language.rope_positions(len(token_ids), layouts)
        params = {"max_tokens": 16, "stop_token_ids": end_tokens(self.model_dir)} | sampling
        request = Request(name, token_ids, layouts, rows, rope, sampling=SamplingParams(**params))
        contract = self.language.row_contract
        request.sees_both_ways = contract is not None and bool(contract.max_uncut)
        self.lease(request)
        return request

    def lease(self, request: Request) -> None:
        """All blocks that it can need."""
        total = len(request.token_ids) + request.sampling.max_tokens
        layout = self.language.kv_layout
        num_blocks = layout.num_state_blocks + layout.rows.count(total)
        request.blocks = [self.free.pop() for _ in range(num_blocks)]

    async def step(self, requests: Sequence[Request], chunk: int) -> None:
        """One step of all unfinished requests."""
        active = [request for request in requests if not request.finished]
        batch = [request.next_step(chunk) for request in active]
        result = await self.language.step(batch)
        for request, sequence, outcome in zip(active, batch, result.outcomes, strict=True):
            request.num_steps += 1
            if isinstance(outcome, tuple):
                request.computed += len(outcome)
                for token in outcome:
                    if not request.finished:
                        request.output.append(token)
                continue
            request.computed += len(sequence.token_ids)
            if sequence.sample is not None:
                assert isinstance(outcome, TokenLogprobs), outcome
                request.output.append(outcome)
        for request in active:
            self._pass(request)

    def _pass(self, request: Request) -> None:
        """Blocks behind its window have another owner, who writes what is no number."""
        layout = self.language.kv_layout
        for place in layout.rows.behind(request.computed):
            if (block := request.blocks[layout.num_state_blocks + place]) != PASSED:
                request.blocks[layout.num_state_blocks + place] = PASSED
                self.language.pool.memory[block].fill_(255)
                self.free.append(block)

    async def run(self, requests: Sequence[Request], chunk: int = 4096) -> list[list[int]]:
        """All requests to their ends; request i joins at step i, so prefill meets decode."""
        steps = 0
        while not all(request.finished for request in requests):
            await self.step(requests[: steps + 1], chunk)
            steps += 1
        return [request.output_ids for request in requests]

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.free.extend(block for block in request.blocks if block != PASSED)
            request.blocks = []
