"""How far Gemma 4 is from transformers: `python -m tests.gpu.gemma_kl [DEVICE] [COUNT]`.

Of made checkpoints with heads as wide as published ones, both in bfloat16 on the same device: nats
a token, over prompts with pictures longer than a window, behind the prompt and behind each of some
tokens after it.  Beside it stand transformers in float32, and pictures that see one way, which a
figure worth anything must notice.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from tests.engine.conftest import chat, drawn_image
from tests.engine.driver import Driver
from tests.engine.reference import reference_inputs
from tests.engine.tiny_models import make_model

WIDE = {"head_dim": 256, "global_head_dim": 512, "hidden_size": 256, "intermediate_size": 512}
TEXT = {
    "gemma4": WIDE | {"num_attention_heads": 8, "sliding_window": 128},
    "gemma4_moe": WIDE | {"num_attention_heads": 8, "sliding_window": 128, "num_experts": 16,
                          "moe_intermediate_size": 128, "num_key_value_heads": 4,
                          "num_global_key_value_heads": 2},
}  # fmt: skip
SPREAD = 0.05
SHARP = 2.0  # of scores' spread, as where a model was trained: others round to another token
BEHIND = 8  # tokens after a prompt
Prompt = tuple[list[dict[str, object]], list[Image.Image]]


class Found(NamedTuple):
    """Nats a token, from transformers in bfloat16."""

    ours: float
    largest: float  # of a prompt
    in_fp32: float  # transformers'
    one_way: float  # ours, where pictures see before them alone


def prompts(count: int) -> list[Prompt]:
    rng = random.Random(44)
    words = "a text about what is seen in all of these pictures and nothing besides".split()
    found: list[Prompt] = []
    for i in range(count):
        pictures = [
            drawn_image(100 * i + n, rng.randint(30, 120), rng.randint(30, 120))
            for n in range(rng.randint(1, 3))
        ]
        said = " ".join(rng.choices(words, k=rng.randint(3, 60)))
        found.append((chat((len(pictures), said)), pictures))
    return found


def behind(count: int) -> list[int]:
    return [97 + 5 * i % 26 for i in range(count)]


@torch.inference_mode()
def of_transformers(model: Any, directory: Path, prompt: Prompt) -> torch.Tensor:
    inputs = reference_inputs(directory, *prompt)
    more = torch.tensor([behind(BEHIND)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
    kinds = inputs["mm_token_type_ids"]
    inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(more).to(kinds)], dim=1)
    there = {name: value.to(model.device) for name, value in inputs.items()}
    return model(**there).logits[0, -1 - BEHIND :].double().log_softmax(-1).cpu()


async def of_ours(serving: Driver, prompt: Prompt) -> torch.Tensor:
    request = await serving.request("r", *prompt, max_tokens=BEHIND + 1)
    step = request.next_step(1 << 20)
    ids = [*step.token_ids, *behind(BEHIND)]
    found = serving.language.logits([replace(step, token_ids=ids, num_drafts=BEHIND)])
    serving.release([request])
    return found.double().log_softmax(-1).cpu()


def nats(expected: Iterable[torch.Tensor], found: Iterable[torch.Tensor]) -> list[float]:
    """Of each prompt, a token."""
    pairs = zip(expected, found, strict=True)
    return [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs]


def soften(directory: Path) -> None:
    """Scores of drawn queries and keys spread as far as heads are wide: of that only rounding would
    be seen.  A drawn router hardly prefers one expert."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "language_model" in name and name.endswith("q_norm.weight"):
            tensor *= SHARP / len(tensor) ** 0.5
        if name.endswith("router.scale"):
            tensor *= SHARP / SPREAD
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


async def measured(family: str, directory: Path, device: str, count: int) -> Found:
    make_model(family, directory, TEXT[family] | {"initializer_range": SPREAD})
    soften(directory)
    config = EngineConfig(
        device=device, dtype="bfloat16", kv_nbytes=64 << 20, threads=2, max_captured_tokens=512
    )
    executor = build_executor(config)
    vision = build_vision(directory, config, executor)
    serving = Driver(directory, vision, build_language(directory, config, executor, 8))
    asked = prompts(count)
    ours = [await of_ours(serving, prompt) for prompt in asked]
    forward: Any = serving.language.forward
    forward._sees_both_ways = False
    one_way = [await of_ours(serving, prompt) for prompt in asked]
    await executor.close()
    theirs = {}
    for dtype in (torch.bfloat16, torch.float32):
        kind = transformers.Gemma4ForConditionalGeneration
        model = kind.from_pretrained(directory, dtype=dtype).eval().to(device)
        theirs[dtype] = [of_transformers(model, directory, prompt) for prompt in asked]
    expected = theirs[torch.bfloat16]
    each = nats(expected, ours)
    mean = lambda found: sum(nats(expected, found)) / count  # noqa: E731
    return Found(mean(ours), max(each), mean(theirs[torch.float32]), mean(one_way))


async def main(device: str, count: int) -> None:
    for family in TEXT:
        with tempfile.TemporaryDirectory() as directory:
            found = await measured(family, Path(directory) / family, device, count)
        print(
            f"{family}: KL {found.ours:.2e} nats a token over {count} prompts with pictures, "
            f"{found.largest:.2e} at most; transformers in float32 {found.in_fp32:.2e}; pictures "
            f"one way {found.one_way:.2e}"
        )


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:2] or ["cuda"]), int((sys.argv[2:3] or ["40"])[0])))
