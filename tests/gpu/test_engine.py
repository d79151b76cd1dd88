"""The engines on a GPU answer as transformers does: exactly in fp32, closely in bf16."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.base import PENDING, StepSequence
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.forward import FusedForward
from epd.engine.language.graphs import PromptGraphs
from epd.messages import SamplingParams, TokenLogprobs
from tests.engine.conftest import model_dir  # noqa: F401  (a fixture)
from tests.engine.driver import Driver, expand, png
from tests.engine.reference import reference_generate, reference_logits
from tests.engine.test_equality import NEW_TOKENS, cases
from tests.engine.tiny_models import (
    FAMILIES,
    OF_FOUR_NORMS,
    OF_GEMMA,
    SECOND_SIZES,
    VISION_FAMILIES,
    is_known,
)
from tests.engine.vision.test_image_ops import NUM_IMAGES, check_images

SEEING = (*VISION_FAMILIES, *SECOND_SIZES, "embedded")
SERVED = [*FAMILIES, *SECOND_SIZES, "embedded"]


@pytest.fixture(scope="module")
def gpu_driver(
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> Callable[..., Driver]:
    @cache
    def make(family: str, dtype: str = "float32", graphs: bool = True) -> Driver:
        if not is_known(family):
            pytest.skip(f"this transformers does not know {family}")
        config = EngineConfig(
            device=cuda, dtype=dtype, kv_nbytes=32 << 20, threads=2, cuda_graphs=graphs
        )
        executor = build_executor(config)
        directory = model_dir(family)
        vision = build_vision(directory, config, executor) if family in SEEING else None
        return Driver(directory, vision, build_language(directory, config, executor, 16))

    return make


@pytest.mark.parametrize("family", SERVED)
async def test_fp32_equals_transformers(family: str, gpu_driver: Callable[..., Driver]) -> None:
    """Greedy tokens of mixed batches in several chunk sizes, graphs included, and logits."""
    serving = gpu_driver(family)
    forward = serving.language.forward
    assert isinstance(forward, FusedForward) == (family not in OF_FOUR_NORMS)
    if isinstance(forward, FusedForward):
        assert forward.graphs is not None
        # Latent rows are expanded where the host knows how many there are.
        assert (forward.prompt_graphs is None) == (family in {"kimi_k25", "mistral4"})
    golden = [reference_generate(serving.model_dir, p, i, NEW_TOKENS) for p, i in cases(family)]
    for chunk in (4096, 16):
        requests = [
            await serving.request(str(i), prompt, images, max_tokens=NEW_TOKENS)
            for i, (prompt, images) in enumerate(cases(family))
        ]
        answers = await serving.run(requests, chunk)
        serving.release(requests)
        assert answers == golden, f"chunks of {chunk}"
    for prompt, images in cases(family):
        request = await serving.request("r", prompt, images)
        logits = serving.language.logits([request.next_step(4096)])[0].cpu()
        serving.release([request])
        expected = reference_logits(serving.model_dir, prompt, images)
        # an image's bytes may differ by a step, which tiny random towers amplify
        limit = 5e-2 if images else 1e-3
        torch.testing.assert_close(logits, expected, atol=limit, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "embedded", "paddleocr_vl"])
@pytest.mark.parametrize("quantum_ms", [0.0, 0.001])
async def test_captured_towers_give_the_same_rows(
    family: str,
    quantum_ms: float,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """Of single images and of all in one batch, behind larger ones and before; in one piece, and
    layer by layer with steps between."""
    directory, rows = model_dir(family), {}
    asked = [images for _, images in cases(family) if images]
    for graphs in (True, False):
        config = EngineConfig(
            device=cuda,
            dtype="bfloat16",
            kv_nbytes=32 << 20,
            threads=2,
            cuda_graphs=graphs,
            max_quantum_ms=quantum_ms,
        )
        executor = build_executor(config)
        vision = build_vision(directory, config, executor, max_batch_patches=1024)
        visual = vision.model.model.visual
        assert hasattr(visual, "graphs") == graphs
        for parts, _ in visual.graphs._graphs.values() if graphs else ():
            assert len(parts) == (len(visual.blocks) if quantum_ms else 1)
        language = build_language(directory, config, executor, 16)
        serving = Driver(directory, vision, language)
        found = []
        together = [image for images in asked for image in images]
        for images in (*asked, together, *asked[::-1]):
            patches = [
                await vision.preprocess(png(image), layout.grid_thw)
                for image, layout in zip(images, expand_all(serving, images), strict=True)
            ]
            run = vision.encode(patches)
            request = await serving.request("r", [{"role": "user", "content": "beside it"}])
            encoded, _ = await asyncio.gather(run, serving.run([request], 4096))
            serving.release([request])
            found += [one.tensor.float().cpu() for one in encoded]  # type: ignore[union-attr]
        rows[graphs] = found
        await executor.close()
    for captured, plain in zip(rows[True], rows[False], strict=True):
        assert float((captured - plain).norm() / plain.norm()) < 2e-2


def expand_all(serving: Driver, images: list[Any]) -> list[Any]:
    content = [{"type": "image"} for _ in images]
    return expand(serving.model_dir, [{"role": "user", "content": content}], images)[1]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "embedded"])
async def test_fp8_is_that_of_the_cpu(
    family: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """Texts alone, so that the tower's rounding is not in it.  What bfloat16 rounds otherwise may
    round to another number of eight bits: on a CPU, float32 and bfloat16 differ by as much in these
    random models.  What answers come to is told by `tests.engine.fp8_accuracy`."""
    directory, logits = model_dir(family), []
    prompts = [[{"role": "user", "content": "tell me " * n}] for n in (1, 3, 40)]
    for device in (cuda, "cpu"):
        config = EngineConfig(
            device=device, dtype="bfloat16", kv_nbytes=32 << 20, threads=2, quantization="fp8"
        )
        executor = build_executor(config)
        serving = Driver(directory, None, build_language(directory, config, executor, 16))
        for prompt in prompts:
            request = await serving.request("r", prompt)
            logits.append(serving.language.logits([request.next_step(4096)])[0].float().cpu())
            serving.release([request])
        await executor.close()
    for found, wanted in zip(logits[:3], logits[3:], strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.2
        if family == "embedded":  # a trained one is surer of what it says
            assert float((found.softmax(-1) - wanted.softmax(-1)).abs().max()) < 0.2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm46v", "internvl"])
async def test_videos_equal_transformers(family: str, gpu_driver: Callable[..., Driver]) -> None:
    """Resized on the CPU, normalised and cut on the device."""
    pytest.importorskip("av")
    from tests.engine.vision.test_video_equality import prepared
    from tests.engine.vision.video_cases import cases as video_cases

    serving = gpu_driver(family)
    for case in video_cases(family):
        request = await prepared(serving, "r", case)
        logits = serving.language.logits([request.next_step(4096)])[0].cpu()
        serving.release([request])
        expected = reference_logits(serving.model_dir, case.messages, case.images, case.videos)
        limit = 5e-2 if case.images else 1e-3
        torch.testing.assert_close(logits, expected, atol=limit, rtol=0)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "ministral3", "glm4v_moe"),
        *("paddleocr_vl", *OF_GEMMA),
    ],
)
async def test_graphs_change_nothing(
    family: str, gpu_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches (F25), of decodes and with prompts: tokens as without graphs, and no block of
    a neighbour moves."""
    texts = {}
    replays: list[int] = []
    for graphs in (True, False):
        serving = gpu_driver(family, graphs=graphs)
        forward = serving.language.forward
        assert isinstance(forward, FusedForward)
        if forward.prompt_graphs is not None:
            monkeypatch.setattr(forward, "prompt_graphs", Counted(forward.prompt_graphs, replays))
        untouched = [
            block
            for block in range(serving.language.num_blocks)
            if block not in serving.free[-400:]
        ]
        before = serving.language.pool.memory[untouched].clone()
        knobs: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_tokens": 9}
        requests = [
            await serving.request(
                str(i), [{"role": "user", "content": "tell " + "me " * i}], seed=i, **knobs
            )
            for i in range(5)
        ]
        if family != "qwen3":
            requests += [
                await serving.request(f"p{i}", prompt, images, seed=i, **knobs)
                for i, (prompt, images) in enumerate(cases(family))
            ]
        texts[graphs] = await serving.run(requests, 16)
        assert torch.equal(serving.language.pool.memory[untouched], before)
        serving.release(requests)
    assert texts[True] == texts[False]
    assert len(replays) > 3


class Counted:
    """Captured steps with prompts; notes their tokens."""

    def __init__(self, graphs: PromptGraphs, replays: list[int]) -> None:
        self.fill = graphs.fill
        self._graphs = graphs
        self._replays = replays

    def replay(self, flat: FlatBatch, *arguments: Any) -> torch.Tensor:
        self._replays.append(flat.shape.num_tokens)
        return self._graphs.replay(flat, *arguments)


async def test_pending_tokens(gpu_driver: Callable[..., Driver]) -> None:
    """Three steps launched at once, each with the tokens of the one before, in graphs."""
    serving = gpu_driver("qwen3")
    language = serving.language
    greedy = SamplingParams(max_tokens=9)
    prompt = list(b"the quick brown")

    def step(ids: list[int], start: int) -> list[StepSequence]:
        return [StepSequence("a", ids, start, (1, 2), None, sample=greedy)]

    futures = [language._executor.launch(language._launch, step(prompt, 0))]
    futures += [
        language._executor.launch(language._launch, step([PENDING], 15 + i)) for i in range(3)
    ]
    found = [(await future).outcomes[0].token_id for future in futures]
    tokens: list[int] = []
    for i in range(4):
        ids = prompt if not i else [tokens[-1]]
        (outcome,) = (await language.step(step(ids, 0 if not i else 14 + i))).outcomes
        assert isinstance(outcome, TokenLogprobs)
        tokens.append(outcome.token_id)
    assert found == tokens


NEAR = ["qwen3_vl", "qwen3_5", *SERVED[SERVED.index("internvl") :]]


# Gemma's scores are not scaled, so in these drawn ones rounding decides (`test_gemma.py`).
@pytest.mark.parametrize("family", [family for family in NEAR if family not in OF_GEMMA])
async def test_bf16_is_close(family: str, gpu_driver: Callable[..., Driver]) -> None:
    serving = gpu_driver(family, "bfloat16")
    for prompt, images in cases(family):
        request = await serving.request("r", prompt, images)
        logits = serving.language.logits([request.next_step(4096)])[0].cpu()
        serving.release([request])
        expected = reference_logits(serving.model_dir, prompt, images)
        error = float((logits - expected).norm() / expected.norm())
        assert error < 0.08, (family, len(images), error)


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "glm_ocr", "paddleocr_vl"])
def test_images_on_the_device(
    family: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    from epd.engine.adapter import adapter_for
    from epd.model_files.checkpoint import read_checkpoint

    adapter = adapter_for(read_checkpoint(model_dir(family)))
    processor = adapter.image_processor()
    assert check_images((adapter, processor, adapter.image_ops(processor)), NUM_IMAGES, cuda) <= 1
