"""Conversations for every family, and what `transformers.generate` answers to them.

One list per family: text alone, one to four images, one image twice, odd sizes, two turns, a
system message; videos, alone and among images, where the family takes them.  The golden answer is
token ids with their log-probabilities, so that a damaged row shows even where it changes no token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.e2e.client import Body, image_part, png
from tests.engine.conftest import chat, drawn_image
from tests.engine.reference import reference_inputs, reference_model, tokenizer
from tests.engine.tiny_models import EMBEDDED, VISION_FAMILIES, WITHOUT_VIDEOS, cached_model
from tests.engine.vision.video_cases import cases

NEW_TOKENS = 16
FAMILIES = (*VISION_FAMILIES, "embedded")
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Golden:
    """A conversation and its greedy continuation, without an end at any token."""

    name: str
    body: Body
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def directory_of(family: str) -> Path:
    return EMBEDDED if family == "embedded" else cached_model(family)


def conversations() -> list[tuple[str, Messages, list[Image.Image]]]:
    """Name, messages with one placeholder per image, images."""
    system: Messages = [{"role": "system", "content": "Be brief."}]
    same, odd = drawn_image(7, 80, 61), drawn_image(2, 37, 101)
    four = [drawn_image(10 + i, 40 + 11 * i, 70 - 9 * i) for i in range(4)]
    return [
        ("text", chat("hello there"), []),
        ("system", [*system, *chat("What is 2 + 2?", "4", "and 3 + 3?")], []),
        ("long text", chat("a longer text that fills several blocks of the pool " * 4), []),
        ("one", chat((1, "What does the image say?")), [drawn_image(1, 64, 64)]),
        ("odd size", chat((1, "odd")), [odd]),
        ("flat", chat((1, "flat")), [drawn_image(20, 180, 33)]),
        ("large", chat((1, "large")), [drawn_image(21, 301, 277)]),
        ("two", chat((2, "compare")), [drawn_image(3, 33, 47), drawn_image(4, 90, 50)]),
        ("one twice", chat((2, "same?")), [same, same]),
        ("three, two equal", chat((3, "which?")), [odd, same, odd]),
        ("four", chat((4, "Read all the images.")), four),
        ("two turns", chat((1, "first"), "yes", (1, "second")), [same, drawn_image(5, 55, 34)]),
    ]


@functools.cache
def goldens(family: str) -> tuple[Golden, ...]:
    directory = directory_of(family)
    found = [
        _golden(
            directory, name, reference_inputs(directory, messages, images), sent(messages, images)
        )
        for name, messages, images in conversations()
    ]
    for i, case in enumerate(() if family in WITHOUT_VIDEOS else cases(family)[1:3]):
        inputs = reference_inputs(directory, case.messages, case.images, case.videos)
        found.append(_golden(directory, f"video {i}", inputs, case.asked))
    return tuple(found)


def heavy_goldens(family: str, count: int) -> list[Golden]:
    """So many conversations, each about an image of its own that takes long to encode."""
    directory, found = directory_of(family), []
    for number in range(count):
        messages, images = chat((1, "read")), [drawn_image(500 + number, 500, 400)]
        inputs = reference_inputs(directory, messages, images)
        found.append(_golden(directory, f"heavy {number}", inputs, sent(messages, images)))
    return found


def _golden(directory: Path, name: str, inputs: dict[str, Any], messages: Messages) -> Golden:
    """By a greedy search of transformers that no end token stops."""
    model = reference_model(directory)
    model.model.rope_deltas = None
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            do_sample=False,
            pad_token_id=256,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = output.sequences[0, length:].tolist()
    logprobs = [
        float(logits[0].float().log_softmax(-1)[token])
        for logits, token in zip(output.logits, ids, strict=True)
    ]
    body = {
        "messages": messages,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }
    return Golden(name, body, length, tuple(ids), tuple(logprobs))


def sent(messages: Messages, images: Sequence[Any]) -> Messages:
    """The same conversation as a client sends it."""
    remaining = iter(images)
    found = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                image_part(png(next(remaining))) if part["type"] == "image" else part
                for part in content
            ]
        found.append({"role": message["role"], "content": content})
    return found


def differences(family: str, golden: Golden, reply: Any) -> list[str]:
    """How a reply differs from the golden answer: status, usage, tokens, log-probabilities."""
    if reply.status != 200:
        return [f"{golden.name}: status {reply.status}: {reply.body}"]
    found = []
    usage = {"prompt_tokens": golden.num_prompt_tokens, "completion_tokens": NEW_TOKENS}
    for key, value in usage.items():
        if reply.body["usage"][key] != value:
            found.append(f"{golden.name}: {key} {reply.body['usage'][key]}, not {value}")
    entries = reply.body["choices"][0]["logprobs"]["content"]
    answered = [bytes(entry["bytes"]) for entry in entries]
    expected = [token_bytes(family, token_id) for token_id in golden.token_ids]
    if answered != expected:
        found.append(f"{golden.name}: tokens {answered}, not {expected}")
    pairs = zip((entry["logprob"] for entry in entries), golden.logprobs, strict=False)
    worst = max(abs(a - b) for a, b in pairs)
    if worst > 1e-3:
        found.append(f"{golden.name}: log-probabilities differ by {worst:.2g}")
    return found


def token_bytes(family: str, token_id: int) -> bytes:
    """In this vocabulary a byte is its id; special tokens follow; the last ids are unused."""
    if token_id < 256:
        return bytes((token_id,))
    piece = tokenizer(directory_of(family)).id_to_token(token_id)
    return piece.encode() if piece is not None else b""
