"""What ranks are asked to do together; each plays the same requests, and tells what it got."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.base import (
    PENDING,
    EncodeFailure,
    Outcome,
    Patches,
    Rows,
    Scoring,
    SlotRows,
    StepSequence,
)
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.sharding import Shard
from epd.engine.vision.engine import TorchVisionEngine
from epd.groups.device.shared_rows import SharedRows
from epd.groups.device.shared_tower import kind_of
from epd.messages import SamplingParams, TokenLogprobs
from epd.model_files.lora import read_adapter
from tests.engine.conftest import CONFIG, chat
from tests.engine.driver import Driver, Request, expand, png
from tests.engine.language.test_decoder import fuse
from tests.engine.language.test_lora import ask_all, serving
from tests.engine.language.test_speculation import oracle, third
from tests.engine.language.test_states import blocks_of, logits

Case = tuple[Any, list[Any]]  # a prompt and its images
LIMIT = {"max_tokens": 10}
SHORT = 4  # tokens ahead of a preemption
LATE_S = 0.03


@cache
def _serving(directory: Path, shard: Shard, config: EngineConfig, *, fused: bool) -> Driver:
    executor = build_executor(config)
    sees = (directory / "preprocessor_config.json").is_file()
    vision = build_vision(directory, config, executor) if sees else None
    language = build_language(directory, config, executor, shard=shard)
    if fused:
        language.forward = fuse(language)
    return Driver(directory, vision, language)


def driver(shard: Shard, directory: Path, *, fused: bool = False, quantization: str = "") -> Driver:
    config = replace(CONFIG, quantization=quantization)
    return _serving(directory, shard, config, fused=fused)


def answers(
    shard: Shard,
    directory: Path,
    cases: Sequence[Case],
    chunk: int = 16,
    golden: Sequence[Sequence[int]] = (),
    fused: bool = False,
    samplings: Sequence[Mapping[str, Any]] = (),
    quantization: str = "",
) -> list[list[int]]:
    """All requests together, prompts beside decodes; with drafts, where the answer is known."""

    async def play() -> list[list[int]]:
        there = driver(shard, directory, fused=fused, quantization=quantization)
        each = samplings or [{}] * len(cases)
        requests = [
            await there.request(str(i), *case, **LIMIT | sampling)
            for i, (case, sampling) in enumerate(zip(cases, each, strict=True))
        ]
        for request, answer in zip(requests, golden, strict=False):
            request.draft = oracle(answer, third)
        said = await there.run(requests, chunk)
        there.release(requests)
        return said

    return asyncio.run(play())


def of_adapters(
    shard: Shard,
    directory: Path,
    modules: Sequence[Path],
    fused: bool,
    quantization: str = "",
    come_later: bool = False,
) -> list[list[int]]:
    """Of all that each of them is asked in one batch, and of one without."""
    config = replace(CONFIG, quantization=quantization)
    plain, root = driver(shard, directory), str(modules[0].parent)
    held = () if come_later else modules
    mixed = serving(plain, *held, config=config, is_fused=fused, shard=shard, runtime_dir=root)

    async def play() -> list[list[int]]:
        if come_later:
            wanted = {read_adapter(path, 16).digest: path.name for path in modules}
            assert await mixed.language.hold_adapters(wanted) == {}
        return await ask_all(mixed, 13)

    return asyncio.run(play())


class Slots:
    """`RowMemory` of one rank: what a test has written there."""

    def __init__(self, slot_nbytes: int, num_slots: int = 64) -> None:
        self.buffer = memoryview(bytearray(slot_nbytes * num_slots))
        self._slot_nbytes = slot_nbytes

    def views(self, rows: SlotRows, nbytes: int) -> list[memoryview]:
        found = []
        for slot in rows.slots[: -(-nbytes // self._slot_nbytes)]:
            size = min(nbytes, self._slot_nbytes)
            found.append(self.buffer[slot * self._slot_nbytes :][:size])
            nbytes -= size
        return found


def from_slots(
    shard: Shard,
    directory: Path,
    cases: Sequence[Case],
    kinds: Sequence[str],
    chunk: int,
    steps: int = 0,
) -> list[list[int]]:
    """Answers where rows have come into slots of the ranks: of image i as `kinds[i % len]` says.

    `steps`: after so many, whose prompt is computed up to the midst of its images gives way.
    """
    return answers_from_slots(driver(shard, directory), shard, cases, kinds, chunk, steps)


def answers_from_slots(
    there: Driver,
    shard: Shard,
    cases: Sequence[Case],
    kinds: Sequence[str],
    chunk: int,
    steps: int = 0,
) -> list[list[int]]:
    """In fp32."""

    async def play() -> list[list[int]]:
        language = there.language
        contract = language.row_contract
        assert contract is not None
        shared = SharedRows(language, language._executor, shard, torch.float32)
        memory = Slots(3 * contract.row_nbytes)
        language.attach_rows(memory)
        serving = Driver(there.model_dir, there.vision, _Sharing(language, shared))  # type: ignore[arg-type]
        free, turn = list(range(64)), 0
        requests = []
        for number, case in enumerate(cases):
            request = await serving.request(str(number), *case, **LIMIT)
            for index, rows in enumerate(request.rows):
                kind = kinds[turn % len(kinds)]
                turn += 1
                if kind == "first":
                    request.rows[index] = rows if not shard.rank else None
                    continue
                told = SlotRows([], rows.num_rows, kind == "sharded")
                most = max(len(told.held(r, shard.size)) for r in range(shard.size))
                slots = [free.pop(turn % len(free)) for _ in range(-(-most // 3))]
                told = dataclasses.replace(told, slots=slots)
                held = told.held(shard.rank, shard.size)
                data = rows.tensor.cpu().numpy().tobytes()[held.start * contract.row_nbytes :]
                for view in memory.views(told, len(held) * contract.row_nbytes):
                    view[:], data = data[: len(view)], data[len(view) :]
                request.rows[index] = told
            requests.append(request)
        for step in range(steps):
            await serving.step(requests[: step + 1], chunk)
        young = [request for request in requests if _has_read_rows(request)]
        assert bool(young) == bool(steps)
        for request in young:
            blocks, request.computed = request.blocks, 0
            serving.lease(request)  # others
            serving.free.extend(blocks)
        said = await serving.run(requests, chunk)
        serving.release(requests)
        return said

    return asyncio.run(play())


def _has_read_rows(request: Request) -> bool:
    in_prompt = request.computed < len(request.token_ids)
    return in_prompt and any(layout.offset < request.computed for layout in request.layouts)


class _Sharing:
    """An engine whose steps share rows first."""

    def __init__(self, engine: TorchLanguageEngine, shared: SharedRows) -> None:
        self._engine = engine
        self.step = shared.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def preempted(shard: Shard, directory: Path, ids: list[int]) -> list[int]:
    """The answer of a request whose blocks are taken away in its middle."""

    async def play() -> list[int]:
        there = driver(shard, directory)
        first = await there.request("first", ids, max_tokens=SHORT)
        (said,) = await there.run([first], 5)
        there.release([first])
        again = await there.request("again", [*ids, *said], max_tokens=LIMIT["max_tokens"] - SHORT)
        (rest,) = await there.run([again], 7)
        there.release([again])
        return [*said, *rest]

    return asyncio.run(play())


def damaged(
    shard: Shard, directory: Path, victim: int
) -> tuple[list[int], list[float], dict[tuple[int, str], float]]:
    """A text, the logits behind it, and by how much they change with each wrong block of its state
    at one rank."""

    async def play() -> tuple[list[int], list[float], dict[tuple[int, str], float]]:
        there = driver(shard, directory)
        texts = ("a text that fills more than one block", "another text, also of some length")
        one, other = [await there.request(text[:1], chat(text), **LIMIT) for text in texts]
        while min(len(one.output), len(other.output)) < SHORT:  # they say different things
            stale = [bytes(view) for view in blocks_of(there, one)]
            await there.step([one, other], 16)
        clean, changes = logits(there, one), {}
        layout = there.language.kv_layout
        for index in range(replace(layout, most_state_blocks=0).num_state_blocks):
            kept = bytes(blocks_of(there, one)[index])
            wrong = {
                "swapped": bytes(blocks_of(there, other)[index]),
                "stale": stale[index],
                "dropped": bytes(len(kept)),
            }
            for damage, content in wrong.items():
                if shard.rank == victim:
                    blocks_of(there, one)[index][:] = content
                changes[index, damage] = float((clean - logits(there, one)).abs().max())
                blocks_of(there, one)[index][:] = kept
        assert torch.equal(clean, logits(there, one))
        there.release([one, other])
        return [*one.token_ids, *one.output_ids], clean[0].tolist(), changes

    return asyncio.run(play())


def outcomes(shard: Shard, directory: Path, ids: list[int], fused: bool) -> list[Outcome]:
    """A prompt with scores, beside one that fails, and the token that is pending then."""
    language = driver(shard, directory, fused=fused).language
    params = SamplingParams(max_tokens=9, num_logprobs=3)
    scoring = Scoring(ids[1:], 2)
    prompt = StepSequence("a", ids, 0, [3, 1], None, sample=params, scoring=scoring)
    broken = StepSequence("b", [10**6], 0, [2], None, sample=params)
    pending = StepSequence("a", [PENDING], len(ids), [3, 1], None, sample=params, output_index=1)
    return [*language.run([broken, prompt]).outcomes, *language.run([pending]).outcomes]


def prompted(shard: Shard, directory: Path, ids: list[int], quantization: str) -> list[float]:
    """Logits behind a prompt, in the fused decoder."""
    language = driver(shard, directory, fused=True, quantization=quantization).language
    table = list(range(language.kv_layout.num_state_blocks - (-len(ids) // 16)))
    sequence = StepSequence("a", ids, 0, table, None, sample=SamplingParams(max_tokens=9))
    found: list[float] = language.logits([sequence])[0].tolist()
    return found


def held(shard: Shard, directory: Path) -> tuple[range, int]:
    """The heads of a rank, and the blocks of its pool."""
    language = driver(shard, directory).language
    layout = language.kv_layout
    return range(layout.first_kv_head, layout.first_kv_head + layout.num_kv_heads), (
        language.num_blocks
    )


def encoded(
    shard: Shard, directory: Path, images: Sequence[Any], broken: int
) -> list[list[list[float]] | str]:
    """The rows of each image, one of which is bad; only the first rank has pixels, and rows."""

    async def play() -> list[list[list[float]] | str]:
        vision = _tower(directory, shard)
        batch = await batch_of(vision, directory, images, broken, shard)
        return shown(await vision.encode(batch))

    return asyncio.run(play())


def shown(found: Sequence[Rows | EncodeFailure]) -> list[list[list[float]] | str]:
    return [r.reason if isinstance(r, EncodeFailure) else r.tensor.tolist() for r in found]


LetIn = tuple[list[list[list[float]] | str], list[int], str]


def let_in(
    shard: Shard,
    directory: Path,
    images: Sequence[Any],
    broken: int,
    ids: list[int],
    num_turns: int,
    late: int,
) -> LetIn:
    """The rows of a batch that is cut and the tokens of steps, one ahead of each of its turns, that
    are given with it at once; and what this rank launched: layers and steps.  `late`: a rank that
    is slow."""
    language, vision = driver(shard, directory).language, _cut_tower(directory, shard)
    late_s = LATE_S if shard.rank == late else 0.0

    async def play() -> LetIn:
        batch = await batch_of(vision, directory, images, broken, shard)
        return await steps_let_in(shard, vision, language, batch, ids, num_turns, late_s)

    return asyncio.run(play())


async def steps_let_in(
    shard: Shard,
    vision: TorchVisionEngine,
    language: TorchLanguageEngine,
    batch: Sequence[Patches],
    ids: list[int],
    num_turns: int,
    late_s: float = 0.0,
) -> LetIn:
    """As `let_in`; without turns where there is one rank."""
    executor, launched = language._executor, list[str]()
    layers = vision._adapter.tower_layers(vision.model)
    hooks = [layer.register_forward_hook(lambda *_: launched.append("l")) for layer in layers]
    steps = []
    encoded = [vision.encode(batch, num_turns if shard.size > 1 else 0)]
    for turn in range(num_turns):
        executor.launch(time.sleep, late_s)
        steps.append(language.step([_decode(ids, turn)]))
        executor.launch(launched.append, "s")
        if shard.size > 1:
            encoded.append(vision.go_on())
    *begun, found = [await each for each in encoded]
    assert not any(begun)
    outcomes = [outcome for step in steps for outcome in (await step).outcomes]
    for hook in hooks:
        hook.remove()
    tokens = [outcome.token_id for outcome in outcomes if isinstance(outcome, TokenLogprobs)]
    return shown(found), tokens, "".join(launched)


def _decode(ids: list[int], index: int) -> StepSequence:
    """A prompt's step, or one behind it that is given before its token is known."""
    params = SamplingParams(max_tokens=99)
    if not index:
        return StepSequence("a", ids, 0, [3, 1, 2], None, sample=params)
    at = len(ids) + index - 1
    return StepSequence("a", [PENDING], at, [3, 1, 2], None, sample=params, output_index=index)


async def batch_of(
    vision: TorchVisionEngine, directory: Path, images: Sequence[Any], broken: int, shard: Shard
) -> list[Patches]:
    """Of which one image is bad; only the first rank has pixels."""
    _, layouts = expand(directory, chat((len(images), "x")), images)
    batch = [
        await vision.preprocess(png(image), layout.grid_thw)
        for image, layout in zip(images, layouts, strict=True)
    ]
    if broken >= 0:
        batch[broken] = dataclasses.replace(batch[broken], pixels=batch[broken].pixels[:, :-1])
    if shard.rank:
        batch = [dataclasses.replace(p, pixels=kind_of(p.pixels)) for p in batch]
    return batch


@cache
def _cut_tower(directory: Path, shard: Shard) -> TorchVisionEngine:
    """On the device of the language model."""
    executor = driver(shard, directory).language._executor
    return build_vision(directory, replace(CONFIG, max_quantum_ms=1.0), executor, shard=shard)


@cache
def _tower(directory: Path, shard: Shard) -> TorchVisionEngine:
    return build_vision(directory, CONFIG, shard=shard)
