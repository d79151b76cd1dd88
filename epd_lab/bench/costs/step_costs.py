"""Made-up steps, timed: what the costs of a card are made of.

Theory of operation
-------------------
Each cost is a time, or the difference of two, of steps made up for it, with nothing else on the
device.  Several equal ones are queued at once, so that the host prepares one while the device
computes another; the first is not counted.  What is attended to is taken out of the table of
tokens, by the costs that were found before.  What is needed comes first; the budget ends further
points of the tables.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from epd.config import ConfigError, Settings
from epd.engine.base import Patches, StepSequence
from epd.messages import SamplingParams
from epd.model_files.geometry import image_geometry
from epd_lab.bench.workload import noise_jpeg
from epd_lab.plan.costs import Launch, StepTimes, TimedStep, Tower, between

if TYPE_CHECKING:
    from epd.engine.device.executor import DeviceExecutor
    from epd.engine.language.engine import TorchLanguageEngine
    from epd.engine.vision.engine import TorchVisionEngine

QUEUED = 5  # equal calls at once
REPEATS = 3  # of that
BATCHES = (8, 32, 128, 256)  # decodes of the table, beside 1 and `DECODES`
DECODES = 64
CONTEXT = 1024
CHUNK = 512
HISTORY = 16_384
LONGEST = 1024  # tokens of one prompt in the table
SIZES = (256, 1024, 4096, 512, 2048, 768, 384, 1536, 8192, 1280, 3072)  # tokens of prompts
IMAGES = ((224, 224), (560, 560), (1120, 1120), (1920, 1080), (4096, 2304))
CHECKS = (  # decodes, what is behind each, tokens of a prompt, what is behind it; all captured
    (64, 1024, 448, 0), (16, 2048, 1024, 1024), (8, 8192, 0, 0), (24, 1024, 1920, 0),
    (4, 9216, 1020, 4608), (32, 2048, 0, 0),
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=1 << 20)
Points = list[tuple[int, float]]


@dataclass(slots=True)
class CalibrationBudget:
    """The seconds for all that is measured, from the time when the engines stand."""

    seconds: float
    began_s: float = field(default_factory=time.perf_counter)
    left_out: list[str] = field(default_factory=list)

    def has_time(self, what: str) -> bool:
        """Else `what` is noted as left out."""
        if time.perf_counter() - self.began_s < self.seconds:
            return True
        self.left_out.append(what)
        return False


def batch_of(
    language: TorchLanguageEngine,
    decodes: int,
    context: int,
    prompts: Sequence[tuple[int, int]],
    num_drafts: int = 0,
) -> list[StepSequence]:
    """`prompts`: tokens, and how many are computed already; `num_drafts`: of each decode, which
    also makes as many.  Raises ConfigError where the KV pool
    has no room for them."""
    layout, first = language.kv_layout, 0
    # Alike ones would choose the same experts.
    words = itertools.cycle(range(len(language.model.lm_head.weight)))
    batch: list[StepSequence] = []
    each = [(1 + num_drafts, context, num_drafts)] * decodes + [(*one, 0) for one in prompts]
    for number, (count, start, drafts) in enumerate(each):
        blocks = layout.num_state_blocks - (-(start + count + drafts) // layout.block_size)
        table = tuple(range(first, first + blocks))
        first += blocks
        tokens = list(itertools.islice(words, count))
        sequence = StepSequence(str(number), tokens, start, table, None, sample=GREEDY)
        batch.append(replace(sequence, num_drafts=drafts, num_wanted=drafts))
    if first > language.num_blocks:
        raise ConfigError(
            f"a step of {len(batch)} sequences has {first * layout.block_nbytes >> 20} MiB of KV; "
            "raise --kv-nbytes"
        )
    return batch


async def step_ms(
    language: TorchLanguageEngine,
    decodes: int,
    context: int,
    *prompts: tuple[int, int],
    repeats: int | None = None,
    before: Callable[[], Sequence[Awaitable[object]]] = tuple,
    num_drafts: int = 0,
) -> float:
    """Of the device.  `before`: what is launched ahead of each repeat.  Raises ConfigError where a
    step fails."""
    batch = batch_of(language, decodes, context, prompts, num_drafts)
    if not language.kv_in_place:
        # What other steps left there is read as keys, and some of it is no number.
        import torch

        language.pool.tensor.zero_()
        torch.cuda.synchronize()
    await language.step(batch)  # the first compiles
    found: list[float] = []
    for _ in range(repeats or REPEATS):
        ahead = before()
        results = await asyncio.gather(*(language.step(batch) for _ in range(QUEUED)))
        await asyncio.gather(*ahead)
        wrong = {getattr(one, "reason", "") for result in results for one in result.outcomes}
        if wrong := wrong - {""}:
            raise ConfigError(f"a step failed: {'; '.join(sorted(wrong))}")
        found += [result.elapsed_s for result in results[1:]]
    return 1e3 * statistics.median(found)


async def tower_ms(vision: TorchVisionEngine, batch: list[Patches]) -> float:
    """Between the ends of runs that are queued behind each other."""
    found: list[float] = []
    for _ in range(REPEATS):
        ends: list[float] = []
        runs = [asyncio.ensure_future(vision.encode(batch)) for _ in range(QUEUED)]
        for run in runs:
            await run
            ends.append(time.perf_counter())
        found.append((ends[-1] - ends[0]) / (QUEUED - 1))
    return 1e3 * statistics.median(found)


@dataclass(slots=True)
class StepMeter:
    """Times made-up work on one device's engines."""

    executor: DeviceExecutor
    language: TorchLanguageEngine
    vision: TorchVisionEngine
    settings: Settings
    budget: CalibrationBudget = field(default_factory=lambda: CalibrationBudget(0.0))

    # --- the language model -----------------------------------------------------------------------

    def _fits(self, decodes: int, context: int, prompt: int = 0, history: int = 0) -> bool:
        language, settings = self.language, self.settings
        block = language.kv_layout.block_size
        needed = decodes * (context + 2 * block) + prompt + history + block
        return (
            decodes + prompt <= settings.engine.max_step_tokens
            and decodes <= settings.decode.max_running
            and needed <= language.num_blocks * block
            and max(context, prompt + history) < language.max_context
        )

    async def step(self) -> StepTimes:
        """All costs of steps."""
        from epd.engine.language.graphs import MIXED_TOKENS

        language = self.language
        capacity = language.num_blocks * language.kv_layout.block_size
        context = min(CONTEXT, language.max_context // 2, capacity // DECODES // 2)
        least = language.kv_layout.block_size
        few_ms = await step_ms(language, DECODES, least)
        many_ms = await step_ms(language, DECODES, context)
        context_ms = max(0.0, many_ms - few_ms) / (DECODES * (context - least))
        history = min(HISTORY, language.max_context - CHUNK, capacity - CHUNK)
        chunk = min(CHUNK, self.settings.engine.max_step_tokens)
        alone_ms = await step_ms(language, 0, 0, (chunk, 0))
        behind_ms = await step_ms(language, 0, 0, (chunk, history))
        pair_ms = max(0.0, behind_ms - alone_ms) / (chunk * history)
        one_ms = await step_ms(language, 1, least)
        less_ms = context_ms * least
        points: Points = [(1, one_ms), (DECODES, few_ms - DECODES * less_ms)]
        points.append((chunk, alone_ms - pair_ms * chunk**2 / 2))
        for tokens in (size for size in SIZES if self._fits(0, 0, size)):
            if self.budget.has_time(f"a step of {tokens} tokens"):
                pieces = [(min(LONGEST, tokens - at), 0) for at in range(0, tokens, LONGEST)]
                took_ms = await step_ms(language, 0, 0, *pieces)
                points.append((tokens, took_ms - pair_ms * sum(n * n / 2 for n, _ in pieces)))
        for decodes in (count for count in BATCHES if self._fits(count, least)):
            if self.budget.has_time(f"{decodes} decodes"):
                took_ms = await step_ms(language, decodes, least)
                points.append((decodes, took_ms - decodes * less_ms))
        table = rising(points)
        few, prompt = 16, chunk - 16
        both_ms = await step_ms(language, few, context, (prompt, 0))
        parts_ms = between(table, chunk) + context_ms * few * context + pair_ms * prompt**2 / 2
        return StepTimes(
            tokens_ms=table,
            context_ns=1e6 * context_ms,
            pair_ns=1e6 * pair_ms,
            mixed_ms=max(0.0, both_ms - parts_ms),
            launch=await self._step_launch(chunk),
            longest=history + chunk,
            max_mixed=MIXED_TOKENS,
        )

    async def checks(self) -> tuple[TimedStep, ...]:
        """Steps that no cost was made of."""
        found: list[TimedStep] = []
        for shape in CHECKS:
            if self._fits(*shape) and self.budget.has_time(f"the check {shape}"):
                prompts = [shape[2:]] * bool(shape[2])
                found.append(TimedStep(*shape, await step_ms(self.language, *shape[:2], *prompts)))
        return tuple(found)

    async def _step_launch(self, chunk: int) -> Launch:
        from epd.engine.language.graphs import MIXED_TOKENS

        engine = self.settings.engine
        if self.language.kv_in_place:  # a CPU: who launches computes
            return Launch(captured_ms=0.0, max_captured=0, one_by_one_ms=0.0)
        captured = min(engine.max_captured_tokens, engine.max_step_tokens) * engine.cuda_graphs
        longest = min(engine.max_step_tokens, 2 * captured or chunk)
        decodes = min(DECODES, longest - MIXED_TOKENS) if captured and longest > MIXED_TOKENS else 0
        few = batch_of(self.language, 0, 0, [(chunk, 0)])
        many = batch_of(self.language, decodes, CHUNK, [(longest - decodes, 0)])
        return Launch(
            captured_ms=await self._host_ms(lambda: self.language.step(few)),
            max_captured=captured,
            one_by_one_ms=await self._host_ms(lambda: self.language.step(many)),
        )

    async def _host_ms(self, call: Callable[[], Awaitable[object]]) -> float:
        """From the call until the launch thread takes the next one."""
        found: list[float] = []
        for _ in range(QUEUED):
            began_s = time.perf_counter()
            done = asyncio.ensure_future(call())
            await asyncio.sleep(0)  # a coroutine is queued when it has begun
            found.append(await self.executor.launch(time.perf_counter) - began_s)
            await done
        return 1e3 * statistics.median(found)

    async def sustained(self, for_s: float) -> float:
        """How many times as long a step with a prompt takes when the device has no rest."""
        chunk = min(2048, self.settings.engine.max_step_tokens, self.language.max_context)
        batch = batch_of(self.language, 0, 0, [(chunk, 0)])
        if for_s <= 0 or not self.budget.has_time("sustained"):
            return 1.0
        await asyncio.sleep(1.0)
        found: list[float] = []
        ends_s = time.perf_counter() + for_s
        while time.perf_counter() < ends_s or len(found) < 2 * QUEUED:
            results = await asyncio.gather(*(self.language.step(batch) for _ in range(QUEUED)))
            found += [result.elapsed_s for result in results[1:]]
        first, last = statistics.median(found[:4]), statistics.median(found[-len(found) // 3 :])
        return max(1.0, last / first)

    # --- the tower --------------------------------------------------------------------------------

    async def tower(
        self, config: dict[str, Any], preprocessor: dict[str, Any]
    ) -> tuple[Tower, float]:
        """All costs of the tower, and nanoseconds per pixel of an image's decoding."""
        images: list[Patches] = []
        pixel_ns = []
        for width, height in IMAGES:
            geometry = image_geometry(config, preprocessor, width, height)
            if images and geometry.num_patches <= images[-1].num_patches:
                continue
            if images and not self.budget.has_time(f"images of {width} x {height}"):
                break
            jpeg = noise_jpeg((width, height), 1)
            took_s: list[float] = []
            for _ in range(REPEATS):
                began_s = time.perf_counter()
                patches = await self.vision.preprocess(jpeg, geometry.grid_thw)
                took_s.append(time.perf_counter() - began_s)
            images.append(patches)
            pixel_ns.append(1e9 * min(took_s) / (width * height))
        largest, small = images[-1], images[0]
        count = max(2, largest.num_patches // small.num_patches)
        many_ms = await tower_ms(self.vision, [small] * count)
        one_ms = await tower_ms(self.vision, [largest])
        per_patch_ms = many_ms / (count * small.num_patches)
        apart = largest.num_patches**2 - largest.num_patches * small.num_patches
        more_ms = one_ms - per_patch_ms * largest.num_patches
        pair_ms = max(0.0, more_ms) / apart if apart else 0.0
        points: Points = []
        for image in images:
            alone_ms = one_ms if image is largest else await tower_ms(self.vision, [image])
            points.append((image.num_patches, alone_ms - pair_ms * image.num_patches**2))
        launch = await self._tower_launch(small, largest)
        table = rising(points)
        return Tower(patches_ms=table, pair_ns=1e6 * pair_ms, launch=launch), statistics.median(
            pixel_ns
        )

    async def _tower_launch(self, small: Patches, largest: Patches) -> Launch:
        from epd.engine.factory import MAX_CAPTURED_PATCHES

        if self.language.kv_in_place:
            return Launch(captured_ms=0.0, max_captured=0, one_by_one_ms=0.0)
        most = min(self.settings.encode.max_batch_patches, MAX_CAPTURED_PATCHES)
        return Launch(
            captured_ms=await self._host_ms(lambda: self.vision.encode([small])),
            max_captured=most * self.settings.engine.cuda_graphs,
            one_by_one_ms=await self._host_ms(lambda: self.vision.encode([largest])),
        )


def rising(points: Points) -> tuple[tuple[int, float], ...]:
    """Sorted by size, each once, and never below what less takes: noise would cost less than
    nothing."""
    found: dict[int, float] = {}
    highest = 1e-6
    for size, value in sorted(points):
        highest = found[size] = max(highest, value)
    return tuple(found.items())
