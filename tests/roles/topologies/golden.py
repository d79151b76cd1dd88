"""Questions whose right answers transformers gives: tokens, log-probabilities, and all logits."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig
from epd.frontend import Generation
from epd.messages import SamplingParams, TokenLogprobs
from epd.roles.compose import Gateway
from epd.tiny import CHECKPOINT
from tests.api.fakes import conversation
from tests.engine.conftest import chat, drawn_image
from tests.engine.driver import png
from tests.engine.reference import (
    ReferenceVideo,
    reference_generate,
    reference_inputs,
    reference_model,
)
from tests.engine.vision.video_cases import Case


@dataclass(frozen=True)
class Question:
    generation: Generation
    token_ids: list[int]
    logprobs: list[float]
    logits: torch.Tensor  # [number of tokens, vocabulary], raw


@cache
def preparer(model_dir: Path = CHECKPOINT) -> Preparer:
    return Preparer(GatewayConfig(model_dir=str(model_dir)))


async def question(
    text: str,
    num_images: int = 0,
    max_tokens: int = 24,
    seed: int = 1,
    model_dir: Path = CHECKPOINT,
) -> Question:
    """A user turn with so many images before the text; greedy, no end token before the limit."""
    images = [drawn_image(seed + n, 70 - 9 * n, 40 + 11 * n) for n in range(num_images)]
    return await ask([((num_images, text) if num_images else text)], images, max_tokens, model_dir)


async def ask(
    turns: list[Any], images: list[Any], max_tokens: int = 24, model_dir: Path = CHECKPOINT
) -> Question:
    messages = chat(*turns)
    urls = iter(base64.b64encode(png(image)).decode() for image in images)
    for message in messages:
        if isinstance(parts := message["content"], list):
            message["content"] = [_with_url(part, urls) for part in parts]
    return await _question(messages, list(chat(*turns)), images, (), max_tokens, model_dir)


async def ask_case(case: Case, max_tokens: int = 24, model_dir: Path = CHECKPOINT) -> Question:
    """A turn with videos; the prompt's ids are transformers' too."""
    messages = conversation(case.asked)
    found = await _question(
        messages, case.messages, case.images, case.videos, max_tokens, model_dir
    )
    inputs = reference_inputs(model_dir, case.messages, case.images, case.videos)
    assert list(found.generation.token_ids) == inputs["input_ids"][0].tolist()
    return found


async def _question(
    sent: list[Any],
    messages: list[Any],
    images: list[Any],
    videos: Sequence[ReferenceVideo],
    max_tokens: int,
    model_dir: Path,
) -> Question:
    """`sent` is what the gateway gets, the rest what transformers gets."""
    prompt = await preparer(model_dir).chat(sent)
    tokens, logits = _reference(model_dir, messages, images, videos, max_tokens)
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=0)
    return Question(Generation(prompt.token_ids, prompt.items, sampling), tokens, chosen, logits)


def _with_url(part: dict[str, str], urls: Iterator[str]) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{next(urls)}"}}


def _reference(
    model_dir: Path,
    messages: list[Any],
    images: list[Any],
    videos: Sequence[ReferenceVideo],
    max_tokens: int,
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens to the limit, and the logits behind each by one forward over all of them."""
    model = reference_model(model_dir)
    asked = (model_dir, messages, images)
    tokens = reference_generate(*asked, max_tokens, videos, eos_token_id=None)
    inputs = reference_inputs(*asked, videos)
    num_prompt = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(tokens)))
    model.model.rope_deltas = None
    with torch.inference_mode():
        return tokens, model(**inputs).logits[0, num_prompt - 1 : -1].float()


async def answer(gateway: Gateway, asked: Question) -> list[TokenLogprobs]:
    """What the cluster says."""
    said: list[TokenLogprobs] = []
    async for update in gateway.role.submit(asked.generation):
        assert update.error is None, update.error
        said += update.logprobs
    return said


def assert_exact(said: list[TokenLogprobs], asked: Question) -> None:
    """Token for token, and log-probabilities within 1e-4."""
    assert [token.token_id for token in said] == asked.token_ids
    worst = max(abs(t.logprob - w) for t, w in zip(said, asked.logprobs, strict=True))
    assert worst < 1e-4, f"log-probabilities differ by {worst:.2e}"


async def ask_all(gateway: Gateway, asked: Sequence[Question]) -> None:
    """At once; each answer is exact."""
    said = await asyncio.gather(*(answer(gateway, one) for one in asked))
    for tokens, one in zip(said, asked, strict=True):
        assert_exact(tokens, one)
