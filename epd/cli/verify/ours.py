"""The side that is proved: the gateway's prompts and both engines, in this process.

It does what the roles do, one request at a time and through the same ports, without messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from epd.api.openai.validation import read_chat
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.prepare import Preparer, Prompt
from epd.cli.verify.questions import Body, Foreign, png, sent
from epd.config import EngineConfig, GatewayConfig, Limits
from epd.engine.adapter import ModelAdapter
from epd.engine.base import EncodeFailure, EngineError, RopePositions, Rows, RowSpan, StepSequence
from epd.engine.device.executor import DeviceExecutor
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.vision.engine import TorchVisionEngine
from epd.engine.vision.preprocess import Preprocessor
from epd.families.registry import adapter_for
from epd.messages import Address, MediaItem, SamplingParams, TokenLogprobs
from epd.model_files.checkpoint import read_checkpoint
from epd.roles.steps.step import layouts_of

CHUNK = 512  # tokens of a prompt in one step
NOBODY = Address("verify", 0, "")  # makes rows: they are here


@dataclass(slots=True)
class Placed:
    """A prompt that can be stepped through: rows of its pictures, positions, blocks."""

    token_ids: tuple[int, ...]
    items: list[MediaItem]
    rows: list[Rows]
    rope: RopePositions
    blocks: list[int]

    def chunk(self, start: int, sample: SamplingParams | None) -> StepSequence:
        stop = min(len(self.token_ids), start + CHUNK)
        positions = self.rope.positions
        return StepSequence(
            request_id="verify",
            token_ids=self.token_ids[start:stop],
            start=start,
            block_table=self.blocks,
            positions=None if positions is None else positions[:, start:stop],
            rope_delta=self.rope.delta,
            spans=list(self._spans(start, stop)),
            sample=sample if stop == len(self.token_ids) else None,
            prompt_ids=self.token_ids,
        )

    def _spans(self, start: int, stop: int) -> Iterator[RowSpan]:
        for item, rows in zip(self.items, self.rows, strict=True):
            for at, first_row, num_rows in item.runs():
                low, high = max(start, at), min(stop, at + num_rows)
                if low < high:
                    yield RowSpan(low - start, first_row + low - at, high - low, rows)


class Ours:
    """Of one directory."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.directory, self.config = directory, config
        self.renderer = ChatRenderer(directory)
        self.limits = Limits()
        self.preparer = Preparer(GatewayConfig(model_dir=str(directory), limits=self.limits))
        weights = config.load_format != "dummy"
        self.adapter: ModelAdapter = adapter_for(read_checkpoint(directory, weights=weights))

    @cached_property
    def _executor(self) -> DeviceExecutor:
        return build_executor(self.config)

    @cached_property
    def vision(self) -> TorchVisionEngine:
        return build_vision(self.directory, self.config, self._executor)

    @cached_property
    def language(self) -> TorchLanguageEngine:
        return build_language(self.directory, self.config, self._executor)

    async def close(self) -> None:
        await self.preparer.close()
        if "_executor" in vars(self):
            await self._executor.close()

    # --- text and pictures ------------------------------------------------------------------------

    def text(self, body: Body) -> str:
        """The prompt as its template writes it.  Raises ApiError."""
        asked = read_chat(sent(body), self.preparer, self.limits)
        return self.renderer.render(asked.messages or [], asked.tools, asked.template_flags)

    def ids(self, text: str) -> list[int]:
        return self.renderer.encode(text, add_special_tokens=False)

    async def prompt(self, body: Body) -> Prompt:
        """Raises ApiError."""
        asked = read_chat(sent(body), self.preparer, self.limits)
        return await self.preparer.chat(
            asked.messages or [], asked.tools, flags=asked.template_flags
        )

    def pixels(self, image: Foreign) -> tuple[torch.Tensor, tuple[int, int, int], int]:
        """Patches, their grid, and how many rows they will give."""
        patches = Preprocessor(self.adapter).patches(image)
        return patches.pixels, patches.grid_thw, patches.num_rows

    async def rows(self, data: bytes, grid_thw: tuple[int, int, int]) -> Rows:
        """What the tower makes of a picture's bytes."""
        patches = await self.vision.preprocess(data, grid_thw)
        (rows,) = await self.vision.encode([patches])
        if isinstance(rows, EncodeFailure):
            raise EngineError(rows.reason)
        return rows

    async def rows_of(self, image: Foreign) -> torch.Tensor:
        _, grid, _ = self.pixels(image)
        rows = await self.rows(png(image), grid)
        return rows.tensor.float().cpu()

    # --- the language model -----------------------------------------------------------------------

    async def place(self, body: Body, num_tokens: int) -> Placed:
        """Room for so many more tokens."""
        prompt = await self.prompt(body)
        placed = enumerate(prompt.items)
        items = [item.placed(number, f"room{number}", NOBODY) for number, item in placed]
        rows = [await self.rows(item.image, item.grid_thw) for item in prompt.items]
        layout = self.language.kv_layout
        total = len(prompt.token_ids) + num_tokens
        count = layout.num_state_blocks - (-total // layout.block_size)
        # Not in order: a table that happens to be so would hide wrong indices.
        blocks = sorted(range(count), key=lambda block: block * 7919 % 1009)
        rope = self.language.rope_positions(len(prompt.token_ids), layouts_of(items))
        return Placed(prompt.token_ids, items, rows, rope, blocks)

    async def logits(self, body: Body) -> torch.Tensor:
        """fp32, behind the prompt's last token, `[vocabulary]`."""
        placed = await self.place(body, 1)
        greedy = SamplingParams(max_tokens=1)
        start = 0
        while start + CHUNK < len(placed.token_ids):
            await self.language.step([placed.chunk(start, None)])
            start += CHUNK
        return self.language.logits([placed.chunk(start, greedy)])[0].cpu()

    async def answer(self, body: Body, num_tokens: int, ends: Sequence[int]) -> list[int]:
        """A greedy answer, step by step over KV blocks."""
        placed = await self.place(body, num_tokens)
        greedy = SamplingParams(max_tokens=num_tokens, stop_token_ids=tuple(ends))
        said: list[int] = []
        start = 0
        step = placed.chunk(0, greedy)
        while True:
            (outcome,) = (await self.language.step([step])).outcomes
            start += len(step.token_ids)
            if start < len(placed.token_ids):
                step = placed.chunk(start, greedy)
                continue
            if not isinstance(outcome, TokenLogprobs):
                raise EngineError(str(outcome))
            said.append(outcome.token_id)
            if outcome.token_id in ends or len(said) == num_tokens:
                return said
            step = replace(
                step,
                token_ids=said[-1:],
                start=start,
                positions=None,
                spans=(),
                output_index=len(said),
                output_ids=tuple(said),
            )
