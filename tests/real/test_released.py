"""SmolLM2 as released tools store it in few bits means here what it means to them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from epd.config import EngineConfig
from epd.engine.base import ChunkScores, Scoring, StepSequence
from epd.engine.factory import build_executor, build_language
from epd.engine.weights.packed_linear import PackedLinear
from tests.real import checkpoint as made
from tests.real.costs import text_ids
from tests.real.released import KINDS, READ

pytestmark = pytest.mark.timeout(900)
TOOL_S = 600.0


@pytest.fixture(scope="session")
def tools() -> Path:
    try:
        return made.tools()
    except made.Unavailable as error:
        pytest.skip(str(error))


async def logprobs(directory: Path, dtype: str, token_ids: list[int]) -> torch.Tensor:
    """Of a text's tokens from the second on, by an engine that keeps weights as stored."""
    config = EngineConfig(dtype=dtype, kv_nbytes=64 << 20, threads=1)
    language = build_language(directory, config, build_executor(config))
    held = [m for m in language.model.modules() if isinstance(m, PackedLinear)]
    assert len(held) == 7 * 30
    *ahead, _ = token_ids
    table = list(range(-(-len(ahead) // config.block_size)))
    scoring = Scoring(token_ids[1:], 0)
    chunk = StepSequence("text", ahead, 0, table, None, scoring=scoring)
    (scores,) = (await language.step([chunk])).outcomes
    assert isinstance(scores, ChunkScores)
    return torch.tensor([told.logprob for told in scores.prompt])


def perplexity(found: torch.Tensor) -> float:
    return math.exp(-found.double().mean())


@pytest.mark.parametrize("kind", ["int4"] if os.environ.get("SHORT") else KINDS)
async def test_means_what_its_tool_reads(
    kind: str, tools: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Perplexities are equal to 1e-2, in float32 far closer; in bfloat16 log-probabilities are as
    near to those of float32 as transformers' are."""
    if kind == "gptq" and sys.version_info[:2] != (3, 11):
        pytest.skip("AutoGPTQ has no wheel for this Python")
    command = [sys.executable, "-m", "tests.real.released", kind, str(checkpoint)]
    place = {"PYTHONPATH": f"{tools}:{Path.cwd()}"}
    directory = tmp_path / "m"
    subprocess.run([*command, str(directory)], env=os.environ | place, check=True, timeout=TOOL_S)
    read, ids = load_file(directory / READ), text_ids(checkpoint)
    (directory / READ).unlink()
    found = {dtype: await logprobs(directory, dtype, ids) for dtype in read}
    exact = read["float32"]
    errors = [float((values["bfloat16"] - exact).norm()) for values in (found, read)]
    tool, ours = perplexity(exact), perplexity(found["float32"])
    half = perplexity(found["bfloat16"])
    print(f"{kind}: perplexity {ours:.5f}, of its tool {tool:.5f}; bfloat16 {half:.5f}, errors of "
          f"log-probabilities {errors[0]:.3f}, of transformers {errors[1]:.3f}")  # fmt: skip
    assert abs(ours - tool) <= 1e-3 and abs(half - tool) <= 0.5
    assert float((found["float32"] - exact).abs().max()) <= 1e-3
    assert errors[0] <= 1.25 * errors[1]
