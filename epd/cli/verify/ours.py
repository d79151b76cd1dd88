"""The side that is proved: the gateway's prompts and both engines, in this process.

It does what the roles do, one request at a time and through the same ports, without messages.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from epd.api.asked.asked import Asked as Chat
from epd.api.openai.validation import read_chat
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.prepare import Preparer, Prompt
from epd.cli.verify.questions import Asked, Body, Foreign, png
from epd.config import EngineConfig, GatewayConfig, Limits
from epd.engine.adapter import ModelAdapter, adapter_for
from epd.engine.base import EncodeFailure, EngineError, Patches, Rows
from epd.engine.device.executor import DeviceExecutor
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.vision.engine import TorchVisionEngine
from epd.engine.vision.preprocess import Preprocessor
from epd.fsm.request import (
    ChunkComputed,
    FirstTokenSampled,
    Request,
    Scheduled,
    StepLaunched,
    TextOnly,
    TokenSampled,
)
from epd.messages import Address, PrefillRequest, SamplingParams, TokenLogprobs
from epd.model_files.checkpoint import read_checkpoint
from epd.roles.steps.record import Record
from epd.roles.steps.step import layouts_of, sequence_of, uncut
from epd.scheduling.prefix_keys import PrefixKeys

T = TypeVar("T")
CHUNK = 512  # tokens of a prompt in one step
NOBODY = Address("verify", 0, "")  # makes rows: they are here


class Ours:
    """Of one directory, with a loop of its own: what it computes, it is waited for (`run`)."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.directory, self.config = directory, config
        self.renderer = ChatRenderer(directory)
        self.preparer = Preparer(GatewayConfig(model_dir=str(directory)))
        self.adapter: ModelAdapter = adapter_for(read_checkpoint(directory))
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Ctrl-C ends it at once."""
        return self._runner.get_loop().run_until_complete(work)

    @cached_property
    def _executor(self) -> DeviceExecutor:
        return build_executor(self.config)

    @cached_property
    def vision(self) -> TorchVisionEngine:
        return build_vision(self.directory, self.config, self._executor)

    @cached_property
    def language(self) -> TorchLanguageEngine:
        return build_language(self.directory, self.config, self._executor)

    def close(self) -> None:
        self.run(self.preparer.close())
        if "_executor" in vars(self):
            self.run(self._executor.close())
        self._runner.close()

    # --- text and pictures ------------------------------------------------------------------------

    def _chat(self, body: Body) -> Chat:
        return read_chat(body, self.preparer, Limits())

    def text(self, body: Body) -> str:
        """The prompt as its template writes it.  Raises ApiError."""
        asked = self._chat(body)
        return self.renderer.render(asked.messages or [], asked.tools, asked.template_flags)

    def ids(self, text: str) -> list[int]:
        return self.renderer.encode(text, add_special_tokens=False)

    async def prompt(self, body: Body) -> Prompt:
        """Raises ApiError."""
        asked = self._chat(body)
        return await self.preparer.chat(
            asked.messages or [], asked.tools, flags=asked.template_flags
        )

    def patches(self, image: Foreign) -> Patches:
        return Preprocessor(self.adapter).patches(image)

    async def _rows(self, data: bytes, grid_thw: tuple[int, int, int]) -> Rows:
        """What the tower makes of a picture's bytes."""
        patches = await self.vision.preprocess(data, grid_thw)
        (rows,) = await self.vision.encode([patches])
        if isinstance(rows, EncodeFailure):
            raise EngineError(rows.reason)
        return rows

    # --- the language model -----------------------------------------------------------------------

    async def request(self, body: Body, num_tokens: int) -> tuple[Request, Record]:
        """As prefill has it when its rows are there; so many tokens of an answer have room."""
        prompt = await self.prompt(body)
        items = tuple(item.placed(n, f"room{n}", NOBODY) for n, item in enumerate(prompt.items))
        message = PrefillRequest(
            request_id="verify", attempt=0, token_ids=prompt.token_ids, num_emitted=0, items=items,
            sampling=SamplingParams(
                max_tokens=num_tokens, stop_token_ids=tuple(self.renderer.end_token_ids)
            ),
            decode=NOBODY, gateway=NOBODY, deadline_s=math.inf,
        )  # fmt: skip
        rope = self.language.rope_positions(len(prompt.token_ids), layouts_of(items))
        request = Request(
            "verify", message, prompt.token_ids, decode_here=True, rope_delta=rope.delta
        )
        layout = self.language.kv_layout
        total = len(prompt.token_ids) + num_tokens
        num_blocks = layout.num_state_blocks + layout.rows.count(total)
        # Not in order: a table that happens to be so would hide wrong indices.
        scattered = sorted(range(num_blocks), key=lambda block: block * 7919 % 1009)
        request.fire(TextOnly())  # its rows are here
        request.fire(Scheduled(tuple(scattered)))
        keys = PrefixKeys(layout.block_size, items, prompt.scope)
        rows = [await self._rows(item.image, item.grid_thw) for item in prompt.items]
        rooms = (item.room for item in items)
        return request, Record(keys, rope.positions, dict(zip(rooms, rows, strict=True)))

    async def _step(self, request: Request, record: Record) -> TokenLogprobs | None:
        """Its next chunk; the token that comes behind the last one."""
        count, contract = min(CHUNK, request.num_left), self.language.row_contract
        if contract is not None and contract.max_uncut:
            count = uncut(request, count)
        sequence = sequence_of(request, record, count)
        request.fire(StepLaunched(len(sequence.token_ids), ahead=False))
        (outcome,) = (await self.language.step([sequence])).outcomes
        if request.num_left:
            request.fire(ChunkComputed())
            return None
        if not isinstance(outcome, TokenLogprobs):
            raise EngineError(str(outcome))
        request.fire(TokenSampled(outcome) if request.output else FirstTokenSampled(outcome))
        return outcome

    async def numbers(self, asked: Asked) -> torch.Tensor:
        """Rows of a picture, or logits behind a prompt, `[vocabulary]`."""
        if not isinstance(asked, dict):
            grid_thw = self.patches(asked).grid_thw
            return (await self._rows(png(asked), grid_thw)).tensor.cpu()
        request, record = await self.request(asked, 1)
        while request.num_left > CHUNK:
            await self._step(request, record)
        return self.language.logits([sequence_of(request, record, request.num_left)])[0].cpu()

    async def answer(self, body: Body, num_tokens: int) -> list[int]:
        """A greedy answer, step by step over KV blocks."""
        request, record = await self.request(body, num_tokens)
        while True:
            token = await self._step(request, record)
            said = [one.token_id for one in request.output]
            ends = request.sampling.stop_token_ids
            if token and (len(said) == num_tokens or token.token_id in ends):
                return said
