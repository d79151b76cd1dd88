"""What `transformers.generate` answers to a question, in fp32, be it penalised or drawn by a seed.

transformers has neither frequency and presence penalties nor draws that a seed and a place decide,
so these two are logits processors here, behind its own.  A draw leaves one token to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd.engine.language.sampler import uniform
from tests.e2e.client import Body
from tests.engine.reference import reference_inputs, reference_model


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer, its end token included, and by how much its closest choice was made."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # raw, as a server tells them
    margin: float  # in logits, after rules; of a draw: in cumulative probability
    num_moved: int  # tokens that are not the most probable one, by a penalty or a draw


class Penalised(LogitsProcessor):
    """OpenAI's definition: by how often, and by whether, a token has been said in the answer."""

    def __init__(self, body: Body, num_prompt: int) -> None:
        self._frequency = body.get("frequency_penalty", 0.0)
        self._presence = body.get("presence_penalty", 0.0)
        self._num_prompt = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids[0, self._num_prompt :].bincount(minlength=scores.shape[-1])
        return scores - self._frequency * said - self._presence * (said > 0)


class Chosen(LogitsProcessor):
    """Leaves the token that is to be said, and notes how close the choice was."""

    def __init__(self, body: Body, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._seed = body.get("seed", 0)
        self._warpers = list(_warpers(body))
        self.margin = float("inf")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._warpers:
            token = self._draw(input_ids, scores)
        else:
            best, second = scores[0].topk(2).values.tolist()
            self.margin = min(self.margin, best - second)
            token = int(scores[0].argmax())
        left = torch.full_like(scores, -torch.inf)
        left[0, token] = 0.0
        return left

    def _draw(self, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        sums = scores[0].double().softmax(-1).cumsum(-1)
        number = uniform(self._seed, input_ids.shape[1] - self._num_prompt)
        token = int((sums > number).to(torch.uint8).argmax())
        edges = [sums[token].item() - number, number - sums[token - 1].item() if token else 1.0]
        self.margin = min(self.margin, *edges)
        return token


def _warpers(body: Body) -> Iterator[Any]:
    """transformers' own, in the order of vLLM; none: greedy."""
    if temperature := body["temperature"]:
        yield TemperatureLogitsWarper(temperature)
        if "min_p" in body:
            yield MinPLogitsWarper(body["min_p"])
        if "top_k" in body:
            yield TopKLogitsWarper(body["top_k"])
        if "top_p" in body:
            yield TopPLogitsWarper(body["top_p"])


def generated(model_dir: Path, body: Body) -> Generated:
    inputs = reference_inputs(model_dir, body["messages"], [])
    num_prompt = inputs["input_ids"].shape[1]
    chosen = Chosen(body, num_prompt)
    count = body["max_tokens"]
    forever = {"eos_token_id": None, "min_new_tokens": count} if body.get("ignore_eos") else {}
    with torch.inference_mode():
        output = reference_model(model_dir).generate(
            **inputs,
            # Else it hides what is padding elsewhere, and here the end of a turn.
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=count,
            do_sample=False,
            repetition_penalty=body.get("repetition_penalty", 1.0),
            logits_processor=[Penalised(body, num_prompt), chosen],
            output_logits=True,
            return_dict_in_generate=True,
            **forever,
        )
    ids = output.sequences[0].tolist()
    token_ids = ids[num_prompt:]
    pairs = list(zip(output.logits, token_ids, strict=True))
    logprobs = [float(logits[0].log_softmax(-1)[token]) for logits, token in pairs]
    num_moved = sum(int(logits[0].argmax()) != token for logits, token in pairs)
    return Generated(ids[:num_prompt], token_ids, logprobs, chosen.margin, num_moved)


def perplexity(model_dir: Path, token_ids: list[int]) -> float:
    """Of a text, from its second token on, by transformers' own loss."""
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        return float(reference_model(model_dir)(ids, labels=ids).loss.double().exp())
