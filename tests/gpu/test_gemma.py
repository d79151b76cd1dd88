"""Gemma 4 on a GPU: answers over many windows, whose blocks others have meanwhile, and the distance
to transformers in bfloat16.  What it shares with other families is in `test_engine.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.forward import FusedForward
from epd.layouts import PASSED
from tests.engine.conftest import model_dir  # noqa: F401  (a fixture)
from tests.engine.driver import Driver
from tests.engine.language.test_gemma import LONG, PROMPT
from tests.engine.reference import reference_generate
from tests.engine.tiny_models import OF_GEMMA, is_known, make_model
from tests.gpu.gemma_kl import (
    BEHIND,
    SPREAD,
    TEXT,
    Prompt,
    behind,
    measured,
    nats,
    prompts,
    soften,
)
from tests.gpu.test_engine import gpu_driver  # noqa: F401  (a fixture)

pytestmark = pytest.mark.gpu
FAMILIES = [
    pytest.param(family, marks=pytest.mark.skipif(not is_known(family), reason="not known here"))
    for family in OF_GEMMA
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_over_many_windows_equals_generate(
    family: str,
    graphs: bool,
    gpu_driver: Callable[..., Driver],  # noqa: F811
) -> None:
    """Beside a prompt with pictures; blocks behind the window are filled by their next owner."""
    serving = gpu_driver(family, graphs=graphs)
    forward = serving.language.forward
    assert isinstance(forward, FusedForward)
    assert (forward.graphs is not None) == (forward.prompt_graphs is not None) == graphs
    golden = reference_generate(serving.model_dir, *LONG, 100, min_new_tokens=100)
    seen = reference_generate(serving.model_dir, *PROMPT, 10)
    for chunk in (7, 4096):
        requests = [await serving.request(n, *LONG, max_tokens=100, min_tokens=100) for n in "ab"]
        requests.append(await serving.request("c", *PROMPT, max_tokens=10))
        assert await serving.run(requests, chunk) == [golden, golden, seen]
        assert requests[0].blocks.count(PASSED) >= 4
        serving.release(requests)


@pytest.mark.parametrize("graphs", [True, False])
async def test_embeddings_of_layers_lie_in_host_memory(
    graphs: bool,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """Read by ids that the device has sampled; the device holds so much less."""
    directory, base = model_dir("gemma4"), EngineConfig(
        device=cuda, dtype="float32", kv_nbytes=32 << 20, threads=2, cuda_graphs=graphs
    )  # fmt: skip
    config = replace(base, per_layer_embeddings="host")
    executor = build_executor(config)
    plain = held_nbytes(build_language(directory, base, executor, 16).model, "cuda")
    language = build_language(directory, config, executor, 16)
    table = language.model.model.language_model.embed_tokens_per_layer.weight
    assert table.is_pinned() and held_nbytes(language.model, "cpu") == table.nbytes
    assert held_nbytes(language.model, "cuda") == plain - table.nbytes
    serving = Driver(directory, build_vision(directory, config, executor), language)
    golden = [reference_generate(directory, *case, 10) for case in (LONG, PROMPT)]
    for chunk in (7, 4096):
        requests = [
            await serving.request(str(i), *case, max_tokens=10)
            for i, case in enumerate((LONG, PROMPT))
        ]
        assert await serving.run(requests, chunk) == golden
        serving.release(requests)
    torch.cuda.synchronize()
    table.data.neg_()  # which captured steps read, too
    requests = [await serving.request("r", *LONG, max_tokens=10)]
    assert await serving.run(requests, 4096) != golden[:1]
    serving.release(requests)
    await executor.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
async def test_kv_in_eight_bits_is_that_of_the_cpu(
    family: str,
    graphs: bool,
    cuda: str,
    tmp_path: Path,
) -> None:
    """Heads of 256 and 512, windows and what sees everything: logits behind prompts with pictures
    and behind decodes that read what was stored.  Rounding sends some tokens of a mixture to other
    experts."""
    directory = tmp_path / family
    make_model(family, directory, TEXT[family] | {"initializer_range": SPREAD})
    soften(directory)
    ways: tuple[tuple[str, Any, Any], ...] = (
        (cuda, "float16", "fp8"),
        ("cpu", "float32", "fp8"),
        (cuda, "float16", "auto"),
    )
    found = []
    for device, dtype, kind in ways:
        config = EngineConfig(
            device=device, dtype=dtype, kv_nbytes=64 << 20, threads=2, cuda_graphs=graphs,
            kv_cache_dtype=kind,
        )  # fmt: skip
        executor = build_executor(config)
        vision = build_vision(directory, config, executor)
        serving = Driver(directory, vision, build_language(directory, config, executor, 8))
        found.append([await in_steps(serving, prompt) for prompt in prompts(6)])
        await executor.close()
    ours, expected, plain = found
    near, cost = (sum(nats(expected, one)) / len(expected) for one in (ours, plain))
    print(f"\n{family}: {near:.2e} nats from the CPU, and {cost:.2e} without eight bits")
    assert near < (0.5 if family == "gemma4" else 2) * cost


async def in_steps(serving: Driver, prompt: Prompt) -> torch.Tensor:
    """Behind a prompt, then behind each token of some decodes."""
    request = await serving.request("r", *prompt, max_tokens=BEHIND + 1)
    step = request.next_step(1 << 20)
    said = [serving.language.logits([step])]
    end = step.start + len(step.token_ids)
    for at, token in enumerate(behind(BEHIND), end):
        one = dataclasses.replace(step, token_ids=[token], start=at, spans=[], positions=None)
        said.append(serving.language.logits([one]))
    serving.release([request])
    return torch.cat(said).double().log_softmax(-1).cpu()


@pytest.mark.parametrize("family", FAMILIES)
async def test_it_is_as_near_as_bfloat16_allows(family: str, cuda: str, tmp_path: Path) -> None:
    found = await measured(family, tmp_path / family, cuda, 40)
    print(f"\n{family}: {found}")
    if family != "gemma4_moe":
        assert found.ours < 1e-3
        return
    # Rounding sends some tokens to other experts: transformers' own does, and costs it more.
    assert found.ours < found.in_fp32 / 2
    assert found.one_way > 10 * found.ours  # a figure that does not notice this has no meaning
