"""A model whose weights stay as they are stored, beside itself with all of them made wide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language
from epd.engine.language.experts import PackedExperts
from epd.engine.weights.packed_linear import PackedLinear
from tests.engine.conftest import model_dir  # noqa: F401  (a fixture)
from tests.engine.driver import Driver
from tests.engine.weights.test_loading import edit_weights
from tests.engine.weights.test_stored import kept_as, one_by_one
from tests.engine.weights.test_stored_fp8 import stored

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["channels", "one"])
async def test_logits_of_mixtures_are_those_of_what_they_mean(
    kind: str,
    graphs: bool,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each expert in eight bits; of four bits the kernels' tests have sizes that a GPU takes."""
    plain = stored(
        model_dir("qwen3_vl_moe"), tmp_path / "apart", lambda name, weight: {name: weight}, {}
    )
    edit_weights(plain, one_by_one)
    await _compare(kept_as(kind, plain, tmp_path / "m")[0], PackedExperts, cuda, graphs)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["int4", "nvfp4", "awq", "gptq", "blocks", "channels"])
async def test_logits_are_those_of_what_they_mean(
    kind: str,
    graphs: bool,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A prompt, and a decode behind it."""
    directory, _ = kept_as(kind, model_dir("qwen3_vl"), tmp_path / "m")
    await _compare(directory, PackedLinear, cuda, graphs)


async def _compare(directory: Path, module: type, cuda: str, graphs: bool) -> None:
    config = EngineConfig(
        device=cuda, dtype="bfloat16", kv_nbytes=16 << 20, cuda_graphs=graphs, dequantize=True
    )
    executor = build_executor(config)
    found = []
    for kept in (False, True):
        language = build_language(directory, replace(config, dequantize=not kept), executor, 8)
        held = [m for m in language.model.modules() if isinstance(m, module)]
        assert bool(held) == kept
        serving = Driver(directory, None, language)
        request = await serving.request("r", list(range(3, 40)), max_tokens=2)
        found += language.logits([request.next_step(4096)])
        await serving.step([request], 4096)
        found += language.logits([request.next_step(4096)])
        serving.release([request])
    for plain, packed in zip(found[:2], found[2:], strict=True):
        assert float((packed - plain).norm() / plain.norm()) < 0.05


@pytest.mark.parametrize("family", ["kimi_k25", "mistral4"])
async def test_latent_rows_of_eight_bits(
    family: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """An engine that gets the blocks of another goes on exactly; one of 16 bits that gets what they
    mean is near."""
    config = EngineConfig(device=cuda, dtype="bfloat16", kv_nbytes=64 << 20, threads=2)
    executor, directory = build_executor(config), model_dir(family)
    eight = replace(config, kv_cache_dtype="fp8", kv_nbytes=16 << 20)
    first, second = (build_language(directory, eight, executor, 8) for _ in range(2))
    plain = build_language(directory, config, executor, 8)
    serving = Driver(directory, None, first)
    request = await serving.request("r", list(range(3, 90)), max_tokens=3)
    while not request.output:
        await serving.step([request], 48)
    second.pool.memory.copy_(first.pool.memory)
    blocks = torch.arange(first.num_blocks, device=cuda)
    for layer in range(first.kv_layout.num_layers):
        rows = first.pool.latent(layer).read(blocks, torch.bfloat16)
        plain.pool.latent(layer).numbers[: len(rows)].copy_(rows)
    step = request.next_step(48)
    found, same, near = (each.logits([step])[0] for each in (first, second, plain))
    assert torch.equal(found, same)
    assert float((near - found).norm() / found.norm()) < 0.05
