"""What per-layer embeddings cost in host memory: steps beside those of a table on the device.

`python -m tests.gpu.speed.host_rows [FILE]`, on a CUDA device: the shape of Gemma 4's E4B (as
published) with random weights in bf16.  Of steps of decodes: the graph, back to back with others,
and from one step to the next as the engine runs them; of a prompt: the device's time.  Then the
gather alone, captured, of tokens that are all different.  FILE: where the JSON goes that is
printed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch

from epd import tiny
from epd.config import EngineConfig
from epd.engine.base import StepSequence
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_executor, build_language
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.forward import FusedForward
from epd_lab.bench.costs import shape
from tests.gpu.speed import step
from tests.gpu.speed.step import GREEDY, STEPS, step_ms
from tests.model_files.published_gemma import CHECKPOINTS, GEMMA4

DECODES = {"1@1150": (1150,), "8@1150": (1150,) * 8, "64@1150": (1150,) * 64}
PROMPT, VOCABULARY, REPEATS = 2048, 262_144, 3
GATHERED = (1, 8, 64, PROMPT)
Where = Literal["device", "host"]
E4B = {
    "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7, "use_double_wide_mlp": False,
}  # fmt: skip


def write(directory: Path) -> Path:
    shape.write(directory, tiny.CHECKPOINT)
    own, _, _ = CHECKPOINTS["google/gemma-4-E2B-it"]
    config = dict(GEMMA4.config)
    for part, more in (("text_config", E4B), ("vision_config", {})):
        config[part] = config[part] | own[part] | more
    (directory / "config.json").write_text(json.dumps(config))
    images = GEMMA4.files["processor_config.json"]["image_processor"]
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    return directory


def tables(language: TorchLanguageEngine, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Blocks of their own for so many tokens each."""
    at, found = 0, []
    for length in lengths:
        end = at + language.kv_layout.rows.count(length)
        found.append(tuple(range(at, end)))
        at = end
    assert at <= language.num_blocks
    return found


def decodes(
    language: TorchLanguageEngine, contexts: Sequence[int], number: int
) -> list[StepSequence]:
    """As `step.batch`, of different tokens and with blocks of several shapes."""
    rng, found = random.Random(number), step.batch(language, contexts, number)
    blocks = tables(language, [context + STEPS + 1 for context in contexts])
    return [
        replace(
            s, block_table=table, token_ids=s.token_ids if number else (rng.randrange(VOCABULARY),)
        )
        for s, table in zip(found, blocks, strict=True)
    ]


def prompt(language: TorchLanguageEngine) -> list[StepSequence]:
    tokens = tuple(random.Random(1).sample(range(VOCABULARY), PROMPT))
    return [StepSequence("p", tokens, 0, tables(language, [PROMPT + 1])[0], None, sample=GREEDY)]


def between(replay: Any, count: int) -> float:
    """Milliseconds of the device, each."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    began.record()
    for _ in range(count):
        replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / count


def graph_ms(language: TorchLanguageEngine, contexts: Sequence[int]) -> float:
    forward = language.forward
    assert isinstance(forward, FusedForward) and forward.graphs is not None
    graphs = forward.graphs
    parts = [forward._flat(one, -1) for one in decodes(language, contexts, 0)]
    with torch.inference_mode():
        assert graphs.replay(parts) is not None
        return between(lambda: graphs.replay(parts), STEPS)


def gather_us(language: TorchLanguageEngine, count: int) -> float:
    """Of the embedding of so many tokens, captured."""
    table = language.model.model.language_model.embed_tokens_per_layer
    rng = random.Random(count)
    ids = torch.tensor(rng.sample(range(VOCABULARY), count), dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        table(ids)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            table(ids)
        return 1e3 * between(graph.replay, STEPS)


async def measured(directory: Path, where: Where) -> dict[str, Any]:
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_nbytes=16 << 30, load_format="dummy",
        max_captured_tokens=PROMPT, max_step_tokens=4096, max_chunk_tokens=4096,
        per_layer_embeddings=where,
    )  # fmt: skip
    executor = build_executor(config)
    language = build_language(directory, config, executor, 64)
    found: dict[str, Any] = {
        "held_mib": {k: held_nbytes(language.model, k) >> 20 for k in ("cuda", "cpu")},
        "graph_ms": {}, "step_to_step_ms": {},
    }  # fmt: skip
    for name, contexts in DECODES.items():
        language.pool.memory.zero_()
        each = [graph_ms(language, contexts) for _ in range(REPEATS)]
        found["graph_ms"][name] = round(statistics.median(each), 3)
        whole_ms, _ = await step.steps(language, contexts, STEPS, decodes)
        found["step_to_step_ms"][name] = round(whole_ms, 3)
    language.pool.memory.zero_()
    found["prompt_ms"] = {str(PROMPT): round(step_ms(language, prompt(language)), 3)}
    found["gather_us"] = {str(n): round(gather_us(language, n), 1) for n in GATHERED}
    await executor.close()
    return found


def main() -> None:
    directory = write(Path(mkdtemp()) / "e4b")
    found: dict[str, Any] = {}
    places: tuple[Where, ...] = ("device", "host")
    for where in places:
        found[where] = asyncio.run(measured(directory, where))
        gc.collect()
        torch.cuda.empty_cache()
    table = found["host"]["held_mib"]["cpu"] << 20
    row = table // VOCABULARY
    found["gather_gb_per_s"] = {
        n: round(int(n) * row / us / 1e3, 1) for n, us in found["host"]["gather_us"].items()
    }
    told = {
        "what": "per-layer embeddings of the E4B shape on the device and in host memory, bf16, "
        "dummy weights (python -m tests.gpu.speed.host_rows)",
        "hardware": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "repeats": REPEATS, "row_nbytes": row, **found,
    }  # fmt: skip
    text = json.dumps(told, indent=1)
    print(text)
    for path in sys.argv[1:]:
        Path(path).write_text(text + "\n")


if __name__ == "__main__":
    main()
