"""What a step with drafts takes beside a plain one, and how many must hold for it to pay.

`python -m tests.gpu.speed.drafts [SHAPE] [profile]`, on a CUDA device: Qwen3.5-9B's shape or
another hybrid's of `epd_lab.bench.costs.shape`, in bf16, with weights and a layer for drafts of no
sense.  Each step ends before the next begins, as with drafts it must.  Of each number of sequences:
milliseconds of a plain step without the layer and with it; of one with drafts that are given (as
n-grams are), whose states are replayed; and of one that makes the next drafts by the layer, too.
Break-even is how many of the drafts must hold, so that it says as many tokens in a second as plain
steps without the layer.  `profile`: and which kernels a step of 1 and of 64 runs, ms of each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import torch

from epd import tiny
from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.base import StepSequence
from epd.engine.factory import build_executor, build_language
from epd.engine.language.engine import TorchLanguageEngine
from epd.messages import SamplingParams
from epd_lab.bench.costs import shape

COUNT, CONTEXT, STEPS, TIMES = 3, 1150, 40, 10
GREEDY = SamplingParams(max_tokens=9999)


def batch(
    language: TorchLanguageEngine, num_sequences: int, num_drafts: int, num_wanted: int
) -> Sequence[StepSequence]:
    sequences, each = [], language.kv_layout.num_state_blocks - (-(CONTEXT + 64) // 16)
    for row in range(num_sequences):
        ids = tuple(100 + row + at for at in range(1 + num_drafts))
        table = tuple(range(row * each, (row + 1) * each))
        sequences.append(
            StepSequence(
                str(row), ids, CONTEXT, table, None, sample=GREEDY, output_index=1,
                num_drafts=num_drafts, num_wanted=num_wanted,
            )
        )  # fmt: skip
    return sequences


def step_ms(language: TorchLanguageEngine, steps: Sequence[StepSequence]) -> float:
    took_s = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        language.run(steps)
        took_s.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(took_s[5:])


def profile(language: TorchLanguageEngine, steps: Sequence[StepSequence]) -> str:
    """Of one step: milliseconds and launches of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(TIMES):
            language.run(steps)
    each = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    lines = [
        f"{event.device_time_total / TIMES / 1e3:8.3f} {event.count / TIMES:6.1f}  {event.key[:90]}"
        for event in each[:28]
    ]
    total = sum(event.device_time_total for event in each) / TIMES / 1e3
    return "\n".join([f"{total:8.3f} ms of the device", *lines])


def main() -> None:
    size = next((size for size in shape.SIZES if size in sys.argv[1:]), "qwen3.5-9b")
    directory = shape.write(Path(mkdtemp()) / size, tiny.CHECKPOINT, size)
    found: dict[tuple[str, int], float] = {}
    counts = (1, 4, 16, 64)
    for method, ways in (("ngram", {"plain": (0, 0), "given": (COUNT, 0)}),
                         ("mtp", {"plain, layer": (0, 0), "made": (COUNT, COUNT)})):  # fmt: skip
        config = EngineConfig(
            device="cuda", dtype="bfloat16", kv_nbytes=24 << 30, load_format="dummy",
            speculative=SpeculativeConfig(method, COUNT, 2, 4),  # type: ignore[arg-type]
        )  # fmt: skip
        language = build_language(directory, config, build_executor(config), 256)
        language.pool.tensor.zero_()
        for name, way in ways.items():
            for count in counts:
                found[name, count] = step_ms(language, batch(language, count, *way))
                if "profile" in sys.argv and count in (1, 64):
                    print(f"{name}, {count} sequences")
                    print(profile(language, batch(language, count, *way)))
        del language
        torch.cuda.empty_cache()
    print(f"{size}, k = {COUNT}, {CONTEXT} tokens: ms of a step, and break-even of {COUNT} drafts")
    print("sequences   plain  plain, layer  given  (even at)   made  (even at)")
    for count in counts:
        plain = found["plain", count]
        given, made = found["given", count], found["made", count]
        even = [f"{x:6.2f}     ({x / plain - 1:5.2f})" for x in (given, made)]
        print(f"{count:9} {plain:7.2f} {found['plain, layer', count]:13.2f} {' '.join(even)}")


if __name__ == "__main__":
    main()
