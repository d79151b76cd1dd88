"""What steps take: of decodes, as a graph and as the engine runs them; with prompts, and why.

`python -m tests.gpu.speed.step [fp8] [SHAPE]`, on a CUDA device: the 4B shape or another of
`epd_lab.bench.costs.shape` with random weights, in bf16 or with `--quantization fp8`; steps are
queued two ahead, as a server does.  Tables come last: milliseconds, the bytes that a step must read
and write and what share of the graph they would take at the rate of a large copy; steps with
prompts; and for a few steps of 64 decodes, and one of prompts, where the device waited and which
kernels it ran.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from epd import tiny
from epd.config import EngineConfig
from epd.engine.base import PENDING, LanguageEngine, StepSequence
from epd.engine.factory import build_executor, build_language
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.forward import FusedForward
from epd.messages import SamplingParams
from epd_lab.bench.costs import shape
from epd_lab.bench.costs.roofline import experts_hit

# Tokens behind each decode: equal ones, and some beside a long one that must not hold them up.
CASES: dict[str, tuple[int, ...]] = {
    "1@1450": (1450,),
    "8@1300": (1300,) * 8,
    "16@1150": (1150,) * 16,
    "+ 1@8700": (*(1150,) * 16, 8700),
    "32@1300": (1300,) * 32,
    "64@1150": (1150,) * 64,
}
# Decodes, and tokens of prompts without history beside them.
PROMPTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "512": ((), (512,)),
    "4 x 1024": ((), (1024,) * 4),
    "32@1150 + 512": ((1150,) * 32, (512,)),
    "32@1150 + 2 x 1024": ((1150,) * 32, (1024,) * 2),
}
STEPS, AHEAD, SHOWN, TIMES = 100, 2, 14, 5
LEAST_GAP_US = 3
GREEDY = SamplingParams(max_tokens=9999)


def batch(language: LanguageEngine, contexts: Sequence[int], number: int) -> list[StepSequence]:
    """Step `number`; what it reads is on its way, but for the first."""
    sequences, at = [], 0
    for row, context in enumerate(contexts):
        end = at + language.kv_layout.num_state_blocks - (-(context + STEPS) // 16)
        sequences.append(
            StepSequence(
                str(row), (PENDING if number else 7 + row,), context + number,
                tuple(range(at, end)), None, sample=GREEDY, output_index=number,
                output_ids=(7,) * number,
            )
        )  # fmt: skip
        at = end
    return sequences


async def steps(
    language: Any,
    contexts: Sequence[int],
    count: int,
    make: Callable[[Any, Sequence[int], int], list[StepSequence]] = batch,
) -> tuple[float, float]:
    """Milliseconds from one to the next, and of the device."""
    waiting: list[asyncio.Future[Any]] = []
    ends_s, took_s = [], []
    for one in [make(language, contexts, number) for number in range(count)]:
        waiting.append(asyncio.ensure_future(language.step(one)))
        await asyncio.sleep(0)
        if len(waiting) > AHEAD:
            result = await waiting.pop(0)
            reasons = {getattr(outcome, "reason", "") for outcome in result.outcomes}
            assert reasons == {""}, reasons
            ends_s.append(time.perf_counter())
            took_s.append(result.elapsed_s)
    await asyncio.gather(*waiting)
    return 1e3 * (ends_s[-1] - ends_s[1]) / (len(ends_s) - 2), 1e3 * statistics.median(took_s)


def with_prompts(
    language: TorchLanguageEngine, contexts: Sequence[int], lengths: Sequence[int]
) -> list[StepSequence]:
    sequences = batch(language, contexts, 0)
    at = 1 + max((block for s in sequences for block in s.block_table), default=-1)
    for row, length in enumerate(lengths):
        end = at + language.kv_layout.num_state_blocks - (-(length + 1) // 16)
        tokens, table = tuple(range(100, 100 + length)), tuple(range(at, end))
        sequences.append(StepSequence(f"p{row}", tokens, 0, table, None, sample=GREEDY))
        at = end
    return sequences


def step_ms(language: TorchLanguageEngine, batch: Sequence[StepSequence]) -> float:
    """Of the device, each step after the one before."""
    return 1e3 * statistics.median(language.run(batch).elapsed_s for _ in range(TIMES))


def graph_ms(language: TorchLanguageEngine, contexts: Sequence[int]) -> float:
    """Of a replay, back to back with others."""
    forward = language.forward
    assert isinstance(forward, FusedForward)
    parts = [forward._flat(one, -1) for one in batch(language, contexts, 0)]
    assert forward.graphs is not None
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        forward.graphs.replay(parts)
        began.record()
        for _ in range(STEPS):
            forward.graphs.replay(parts)
        ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / STEPS


def step_nbytes(language: TorchLanguageEngine, contexts: Sequence[int]) -> int:
    """That a step must read and write at least: weights and head once, keys and values of what is
    behind each, and states twice.  Of a mixture, the experts that are hit if all are as likely."""
    layout, model = language.kv_layout, language.model
    layers: Any = language._adapter.language_model(model).layers
    weights = [*layers.named_parameters(), ("", model.lm_head.weight)]
    text, hit = language._adapter.text_config, 1.0
    if num_experts := getattr(text, "num_experts", 0):
        hit = experts_hit(num_experts, text.num_experts_per_tok, len(contexts)) / num_experts
    states = sum(t.num_layers * t.num_pieces * t.piece_nbytes for t in layout.tensors)
    rows = sum(contexts) * layout.block_nbytes // layout.block_size
    nbytes = sum(w.nbytes * (hit if ".mlp.experts." in name else 1) for name, w in weights)
    return int(nbytes) + rows + 2 * states * len(contexts)


def copied_nbytes_per_s() -> float:
    """Read and written by a large copy."""
    source, target = torch.empty(2, 1 << 30, dtype=torch.int32, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    began.record()
    for _ in range(10):
        target.copy_(source)
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * 10 * 2 * source.nbytes / began.elapsed_time(ended)


def told(seen: profile) -> list[str]:
    """Of all that the device did."""
    events = [event for event in seen.events() or () if "CUDA" in str(event.device_type)]
    work = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    gaps_us: Counter[str] = Counter()
    kernels_us: Counter[str] = Counter()
    first_us, until_us, last = -1.0, 0.0, ""
    for begin_us, end_us, name in sorted(work):
        if first_us < 0:
            first_us = until_us = begin_us
        if begin_us > until_us + LEAST_GAP_US:
            gaps_us[f"{last[:48]} > {name[:48]}"] += int(begin_us - until_us)
        if end_us > until_us:
            until_us, last = end_us, name
        kernels_us[name[:90]] += int(end_us - begin_us)
    lines = [f"of {(until_us - first_us) / 1e3:.1f} ms it waited {gaps_us.total() / 1e3:.1f}"]
    lines += [f"  gap {us:8} us  {name}" for name, us in gaps_us.most_common(12)]
    return [*lines, *(f"  {us:12} us  {name}" for name, us in kernels_us.most_common(24))]


async def main() -> None:
    quantization: Any = "fp8" if "fp8" in sys.argv[1:] else ""
    size = next((size for size in shape.SIZES if size in sys.argv[1:]), "4b")
    directory = shape.write(Path(mkdtemp()) / size, tiny.CHECKPOINT, size)
    kv_nbytes = (10 if size == "30b-a3b" else 24) << 30  # whose weights take 57
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_nbytes=kv_nbytes, load_format="dummy",
        max_captured_tokens=0, quantization=quantization,
    )  # fmt: skip
    rate = copied_nbytes_per_s()
    torch.cuda.empty_cache()
    language = build_language(directory, config, build_executor(config), 64)
    lines = [f"{size}, a copy moves {rate / 1e9:.0f} GB/s"]
    lines.append("decodes      graph, ms  from step to step  of the device       MB  share")
    for name, contexts in CASES.items():
        # No prompt wrote what is behind them: what cases before left there is states read as keys.
        language.pool.tensor.zero_()
        whole_ms, device_ms = await steps(language, contexts, STEPS)
        took_ms, nbytes = graph_ms(language, contexts), step_nbytes(language, contexts)
        lines.append(
            f"{name:12} {took_ms:8.2f} {whole_ms:18.2f} {device_ms:14.2f} {nbytes / 1e6:8.0f} "
            f"{1e3 * nbytes / rate / took_ms:6.2f}"
        )
    lines.append("with prompts         of the device, ms")
    for name, case in PROMPTS.items():
        language.pool.tensor.zero_()
        lines.append(f"{name:20} {step_ms(language, with_prompts(language, *case)):18.2f}")
    language.pool.tensor.zero_()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        await steps(language, CASES["64@1150"], SHOWN)
        torch.cuda.synchronize()
    lines += [f"{SHOWN} steps of 64@1150", *told(seen)]
    prompts = with_prompts(language, *PROMPTS["4 x 1024"])
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        language.run(prompts)
    lines += ["a step of 4 x 1024", *told(seen)]
    print("\n".join(lines))


if __name__ == "__main__":
    asyncio.run(main())
