"""What eight bits cost: `python -m tests.engine.fp8_accuracy [DEVICE] [PER_TASK]`.

Of the bundled model: each task's fresh conversations are answered in bfloat16, in float32, and with
`--quantization fp8`, `--kv-cache-dtype fp8` and both; then each computes the logits behind every
token of bfloat16's answers.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.tiny import CHECKPOINT
from tests.engine.driver import Driver, Request
from tests.engine.reference import tokenizer
from training.tasks import TASKS, Sample, exact_match, fresh_samples

KINDS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "both": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}
TOGETHER = 8


async def asked(serving: Driver, name: str, sample: Sample) -> Request:
    content = [part for message in sample.messages for part in message["content"]]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    images = [sample.images[int(url.partition(":")[2])] for url in urls]
    return await serving.request(name, sample.messages, images, max_tokens=128)


async def answers(serving: Driver, samples: list[Sample]) -> list[list[int]]:
    found: list[list[int]] = []
    for at in range(0, len(samples), TOGETHER):
        some = samples[at : at + TOGETHER]
        requests = [await asked(serving, str(i), sample) for i, sample in enumerate(some)]
        found += await serving.run(requests)
        serving.release(requests)
    return found


async def logits(serving: Driver, sample: Sample, answer: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]`: behind the prompt, and behind each token of the answer but the
    last."""
    request = await asked(serving, "r", sample)
    step = request.next_step(4096)
    forced = answer[:-1]
    positions: Any = step.positions
    if positions is not None:
        first = len(step.token_ids) + step.rope_delta
        line = np.arange(first, first + len(forced))
        positions = np.concatenate([positions, np.broadcast_to(line, (3, len(forced)))], axis=1)
    ids = [*step.token_ids, *forced]
    whole = replace(step, token_ids=ids, positions=positions, num_drafts=len(forced))
    found = serving.language.logits([whole])
    serving.release([request])
    return found.double().cpu()


async def main(device: str, per_task: int) -> None:
    samples = [sample for task in TASKS for sample in fresh_samples(task, per_task)]
    serving: dict[str, Driver] = {}
    for kind, settings in KINDS.items():
        config = EngineConfig(device=device, threads=2, kv_nbytes=64 << 20, **settings)  # type: ignore[arg-type]
        executor = build_executor(config)
        vision = build_vision(CHECKPOINT, config, executor)
        serving[kind] = Driver(CHECKPOINT, vision, build_language(CHECKPOINT, config, executor))
    said = {kind: await answers(driver, samples) for kind, driver in serving.items()}
    words = tokenizer(CHECKPOINT)
    plain = said["bfloat16"]
    forced = [await logits(serving["bfloat16"], s, a) for s, a in zip(samples, plain, strict=True)]
    for kind, driver in serving.items():
        pairs = zip(said[kind], samples, strict=True)
        right = sum(exact_match(words.decode(ids), sample.answer) for ids, sample in pairs)
        same = sum(a == b for a, b in zip(said[kind], plain, strict=True))
        tokens = agreed = 0
        divergence = 0.0
        for sample, answer, expected in zip(samples, plain, forced, strict=True):
            found = (await logits(driver, sample, answer)).log_softmax(-1)
            wanted = expected.log_softmax(-1)
            tokens += len(found)
            agreed += int((found.argmax(-1) == wanted.argmax(-1)).sum())
            divergence += float((wanted.exp() * (wanted - found)).sum())
        likeliest, nats = agreed / tokens, divergence / tokens
        print(
            f"{kind:9} {right} of {len(samples)} right, {same} as in bfloat16; of {tokens} tokens "
            f"the likeliest is the same for {likeliest:.2%}; KL {nats:.2e} nats a token"
        )


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(given[0] if given else "cpu", int(given[1]) if len(given) > 1 else 25))
