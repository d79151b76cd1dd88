"""What a model of true size takes, of two numbers of its layers: memory and times of steps.

Theory of operation
-------------------
Weights are random (`--load-format dummy`), and a model of any size is probed by its first layers.
Each number of layers has a process of its own, with the memory of a card to itself.  Of layers that
are alike, what the second adds to the first is what so many layers take; embedding, head and
sampling are in the first.  So the whole lies on a line through both (`probe_table`).  Where
layers differ, both numbers must differ by whole periods: layers of Qwen3.6 by four, and of
Kimi-K2.5 both must have the dense one.  Where the second is the whole, nothing is extrapolated.

Steps are those of `step_costs`: made up, with nothing else on the device.  The device sleeps ahead
of them, until several are queued: the host's part, which few layers do not hide, is not in the
times.  The tower is not captured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from epd import tiny
from epd.cli.scratch import scratch
from epd.cli.start.preflight import computed_nbytes
from epd.config import Settings, SpeculativeConfig
from epd.engine.preload import NVML_ANSWERS
from epd.families.registry import family_of
from epd.model_files.checkpoint import read_config, read_preprocessor
from epd.model_files.config_sizes import Sizes
from epd.model_files.first_layers import cut
from epd.model_files.geometry import image_geometry
from epd_lab.bench.costs import shape, step_costs
from epd_lab.bench.workload import noise_jpeg

if TYPE_CHECKING:
    from epd.engine.device.executor import DeviceExecutor
    from epd.engine.language.engine import TorchLanguageEngine

PROMPTS = (2048, 8192)  # tokens, in chunks as they are served
DECODES = (1, 32, 128)  # of a step
CONTEXT = 2048  # tokens behind each
IMAGE = (1920, 1080)
SLEEP_CYCLES = 120_000_000  # of the device, 60 ms: a host queues the steps of a repeat meanwhile
ROWS_NBYTES = 1 << 30  # of images, on the device: several runs of the tower are queued
# Imported once, for all processes.
PRELOADED = ["epd_lab.bench.costs.probe", "epd.engine.factory", "transformers.modeling_utils"]


@dataclass(frozen=True, slots=True)
class Timings:
    """What is timed: steps of so many decodes, prompts of so many tokens, an image or none."""

    decodes: tuple[int, ...]
    prompts: tuple[int, ...]
    sees: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """One model.  `size`: of `shape`; empty: `directory`.  `layers`: rising numbers of them.
    `stored`: its quantization_config; None: it has none, or that of `directory`.  `num_drafts`: by
    its layer for them, of steps that are timed, too."""

    name: str
    layers: tuple[int, ...]
    size: str = ""
    directory: Path = Path()
    quantization: str = ""
    stored: Mapping[str, Any] | None = None
    num_drafts: int = 0


PROBES = (
    Probe("Qwen3-VL-8B", (4, 36), "8b"),
    Probe("Qwen3-VL-32B, fp8", (4, 64), "32b", quantization="fp8"),
    Probe("Qwen3-VL-30B-A3B", (4, 48), "30b-a3b"),
    Probe("Qwen3.6-35B-A3B", (8, 40), "qwen3.6-35b-a3b"),
    Probe("Qwen3-VL-235B-A22B", (6, 18), "235b-a22b"),
    Probe("Kimi-K2.5, experts in 16 bits", (2, 4), "kimi-k2.5"),
)


def run(
    probes: Sequence[Probe], settings: Settings, limit_s: float, timed: Timings | None = None
) -> Iterator[dict[str, Any]]:
    """A row of each probe and number of layers, as soon as it is there: `figures`, or `failed`, a
    sentence.  `limit_s`: of each, after which it is ended.  `timed`: by default all."""
    timed = timed or Timings(DECODES, PROMPTS)
    os.environ.update(NVML_ANSWERS)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for probe in probes:
        with ExitStack() as held:
            place = held.enter_context(scratch("epd-probe-"))
            directory = probe.directory
            if probe.size:
                directory = shape.write(place / probe.size, tiny.CHECKPOINT, probe.size)
                shape.store(directory, probe.stored)
            config = read_config(directory)
            sizes = Sizes(directory / "config.json", config, family_of(directory, config))
            # All are refused, or none, before the first is measured.
            cuts = {number: cut(directory, number, place / f"{number}") for number in probe.layers}
            for number, layers in cuts.items():
                engine = msgspec.structs.replace(
                    settings.engine, load_format="dummy", quantization=probe.quantization,
                    device=settings.engine.device.split(",")[0], max_captured_tokens=0,
                    max_quantum_ms=0.0,
                )  # fmt: skip
                of_layers = msgspec.structs.replace(settings, model_dir=str(layers), engine=engine)
                sees = timed.sees and number == probe.layers[-1]
                whole = str(directory) if sees else ""
                began_s = time.perf_counter()
                found = _in_process(context, of_layers, whole, limit_s, timed, probe.num_drafts)
                yield {
                    "model": probe.name,
                    "whole": sizes("layers"),
                    "layers": number,
                    "quantization": probe.quantization,
                    "took_s": round(time.perf_counter() - began_s, 1),
                    **found,
                }


def _in_process(
    context: Any, settings: Settings, whole: str, limit_s: float, timed: Timings, num_drafts: int
) -> dict[str, Any]:
    """Its end gives the device back."""
    receiver, sender = context.Pipe(duplex=False)
    asked = sender, settings, whole, timed, num_drafts
    process = context.Process(target=_child, args=asked, daemon=True)
    process.start()
    sender.close()
    found: dict[str, Any] = {"figures": {}}
    ends_s = time.monotonic() + limit_s
    try:
        while receiver.poll(max(0.0, ends_s - time.monotonic())):
            found |= json.loads(receiver.recv_bytes())
        found["failed"] = f"not done within {limit_s:g} s"
    except EOFError:
        process.join()
        if process.exitcode:
            found["failed"] = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    return found


def _child(
    sender: Connection, settings: Settings, whole: str, timed: Timings, num_drafts: int
) -> None:
    def tell(found: dict[str, Any]) -> None:
        sender.send_bytes(json.dumps(found).encode())

    figures = Told(tell)
    try:
        asyncio.run(_measure(settings, whole, figures, timed, num_drafts))
    except Exception as error:
        tell({"failed": f"{type(error).__name__}: {error}"})
    sender.close()


class Told(dict[str, float]):
    """Figures that are sent as soon as one is there."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        self._tell({"figures": self})


async def _measure(
    settings: Settings, whole: str, found: Told, timed: Timings, num_drafts: int = 0
) -> None:
    """`whole`: the directory with all levels of the tower, which is timed too; empty: it is not."""
    from epd.engine.factory import build_executor

    executor = build_executor(settings.engine)
    try:
        if whole:
            await _of_tower(settings, whole, executor, found)
            gc.collect()
        await _of_language(settings, executor, found, timed)
        if num_drafts:
            _at_rest_nbytes()  # what is gone is the device's again
            await _of_drafts(settings, executor, found, timed, num_drafts)
    finally:
        await executor.close()


async def _of_tower(settings: Settings, whole: str, executor: DeviceExecutor, found: Told) -> None:
    from epd.engine.device.memory_plan import held_nbytes
    from epd.engine.factory import build_vision

    directory = Path(whole)
    engine = msgspec.structs.replace(settings.engine, cuda_graphs=False)
    batch_patches = settings.encode.max_batch_patches
    vision = build_vision(directory, engine, executor, max_batch_patches=batch_patches)
    found["tower_nbytes"] = held_nbytes(vision.model)
    found["tower_computed_nbytes"] = computed_nbytes(directory, engine).tower
    vision.reserve(ROWS_NBYTES, 0)
    at_rest_nbytes = _at_rest_nbytes()
    geometry = image_geometry(read_config(directory), read_preprocessor(directory), *IMAGE)
    patches = await vision.preprocess(noise_jpeg(IMAGE, 1), geometry.grid_thw)
    found["image_ms"] = await step_costs.tower_ms(vision, [patches])
    found["tower_workspace_nbytes"] = _most_nbytes() - at_rest_nbytes


async def _of_language(
    settings: Settings, executor: DeviceExecutor, found: Told, timed: Timings
) -> None:
    from epd.engine.device.memory_plan import RESERVE_NBYTES, SMALL_POOL, held_nbytes
    from epd.engine.factory import build_language

    engine, directory = settings.engine, Path(settings.model_dir)
    language = build_language(directory, engine, executor, max(timed.decodes))
    pool, layout = language.pool, language.kv_layout
    if language.kv_in_place:
        language.attach_kv(memoryview(bytearray(pool.nbytes)))
    found["weights_nbytes"] = held_nbytes(language.model)
    computed = computed_nbytes(directory, engine)
    found["computed_nbytes"] = computed.language
    found["outside_nbytes"] = computed.outside
    found["kv_token_nbytes"] = layout.block_nbytes / layout.block_size
    found["kv_heads"] = layout.num_kv_heads
    found["state_nbytes"] = layout.num_state_blocks * layout.block_nbytes
    found["reserve_nbytes"] = RESERVE_NBYTES
    found["rows_nbytes"] = settings.encode.cache_device_nbytes * 5 // 4
    found["pool_tokens"] = SMALL_POOL * engine.max_step_tokens

    at_rest_nbytes = _at_rest_nbytes()
    for decodes in timed.decodes:
        found[f"decode_{decodes}_ms"] = await _step_ms(language, executor, decodes)
    chunk = min(engine.max_step_tokens, engine.max_chunk_tokens)
    for tokens in timed.prompts:
        parts = [(min(chunk, tokens - at), at) for at in range(0, tokens, chunk)]
        took_ms = [await _step_ms(language, executor, 0, part) for part in parts]
        found[f"prefill_{tokens}_ms"] = sum(took_ms)
    found["workspace_nbytes"] = _most_nbytes() - at_rest_nbytes


async def _of_drafts(
    settings: Settings, executor: DeviceExecutor, found: Told, timed: Timings, num_drafts: int
) -> None:
    """Of steps that verify so many drafts of each sequence, and make the next ones."""
    from epd.engine.factory import build_language

    drafts = SpeculativeConfig("mtp", num_drafts)
    engine = msgspec.structs.replace(settings.engine, speculative=drafts)
    rows = max(timed.decodes) * (1 + num_drafts)
    language = build_language(Path(settings.model_dir), engine, executor, rows)
    if language.kv_in_place:
        language.attach_kv(memoryview(bytearray(language.pool.nbytes)))
    for decodes in timed.decodes:
        took_ms = await _step_ms(language, executor, decodes, num_drafts=num_drafts)
        found[f"drafted_{decodes}_ms"] = took_ms


async def _step_ms(
    language: TorchLanguageEngine,
    executor: DeviceExecutor,
    decodes: int,
    *prompt: tuple[int, int],
    num_drafts: int = 0,
) -> float:
    import torch

    on_gpu = not language.kv_in_place

    def sleep() -> Sequence[Awaitable[object]]:
        return [executor.launch(torch.cuda._sleep, SLEEP_CYCLES)] if on_gpu else ()  # noqa: SLF001

    context, repeats = (0, 1) if prompt else (CONTEXT, None)
    return await step_costs.step_ms(
        language, decodes, context, *prompt, repeats=repeats, before=sleep, num_drafts=num_drafts
    )


def _at_rest_nbytes() -> int:
    """That tensors have on the device; from here on the most is looked for."""
    import torch

    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _most_nbytes() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
