"""What adapters cost: steps of 0, 1 and 4 of them, beside an engine that knows none.

`python -m tests.gpu.speed.lora [fp8]`, on a CUDA device: the 4B shape with random weights in bf16,
adapters of rank 16 of all linear layers.  Sequences have them by turns.  Graphs of decodes are
replayed back to back; steps with prompts are not captured.  Then which kernels a step of 4 ran.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from epd import tiny
from epd.config import EngineConfig, LoraConfig
from epd.engine.factory import build_executor, build_language
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.forward import FusedForward
from epd_lab.bench.costs import shape
from tests.gpu.speed.step import STEPS, batch, step_ms, told, with_prompts

NUM_ADAPTERS, RANK = 4, 16
CASES = {"1@1450": (1450,), "8@1300": (1300,) * 8, "32@1300": (1300,) * 32}
PROMPTS = (1024,) * 4
MIXES = (0, 1, NUM_ADAPTERS)


def build(directory: Path, quantization: Any, *, enabled: bool) -> TorchLanguageEngine:
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_nbytes=12 << 30, load_format="dummy",
        max_captured_tokens=0, quantization=quantization,
        lora=LoraConfig(enabled=enabled, max_loras=NUM_ADAPTERS, max_lora_rank=RANK),
    )  # fmt: skip
    language = build_language(directory, config, build_executor(config), 32)
    language.pool.tensor.zero_()
    if language.bank is not None:
        for number in range(NUM_ADAPTERS):
            hold(language, str(number))
    return language


def hold(language: TorchLanguageEngine, digest: str) -> None:
    """An adapter of random numbers."""
    bank = language.bank
    assert bank is not None
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = {}
    for path, layer in bank._linears.items():
        a = torch.randn(RANK, layer.in_features, **options) / layer.in_features**0.5
        weights[path] = a, torch.randn(layer.out_features, RANK, **options) / 100
    bank.hold(digest, weights)


def of(sequences: Sequence[Any], num_adapters: int) -> list[Any]:
    """They have so many adapters by turns."""
    names = [str(number) for number in range(num_adapters)] or [""]
    return [replace(s, adapter=names[i % len(names)]) for i, s in enumerate(sequences)]


def graph_ms(language: TorchLanguageEngine, contexts: Sequence[int], num_adapters: int) -> float:
    forward = language.forward
    assert isinstance(forward, FusedForward) and forward.graphs is not None
    parts = [forward._flat(one, -1) for one in of(batch(language, contexts, 0), num_adapters)]
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        for step in range(STEPS + 1):
            if step == 1:
                began.record()
            assert forward.graphs.replay(parts, adapters=num_adapters > 0) is not None
        ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / STEPS


def main() -> None:
    quantization = "fp8" if "fp8" in sys.argv[1:] else ""
    directory = shape.write(Path(mkdtemp()) / "4b", tiny.CHECKPOINT, "4b")
    rows: dict[str, list[float]] = {}
    for enabled in (False, True):
        language = build(directory, quantization, enabled=enabled)
        for number in MIXES if enabled else (0,):
            for name, contexts in CASES.items():
                rows.setdefault(name, []).append(graph_ms(language, contexts, number))
            prompts = of(with_prompts(language, (), PROMPTS), number)
            rows.setdefault("4 x 1024", []).append(step_ms(language, prompts))
        if enabled:
            decodes = of(batch(language, CASES["32@1300"], 0), NUM_ADAPTERS)
            language.run(decodes)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                language.run(decodes)
            kernels = told(seen)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                language.run(prompts)
            kernels += told(seen)
        del language
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(kernels))
    print(f"ms              without  {'  '.join(f'{n} adapters' for n in MIXES)}")
    for name, cells in rows.items():
        print(f"{name:12}" + "".join(f"{cell:11.3f}" for cell in cells))


if __name__ == "__main__":
    main()
