"""Adapters on a GPU: mixed in one batch, captured and not, they answer as merged into the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.forward import FusedForward
from tests.engine.conftest import chat, model_dir  # noqa: F401  (a fixture)
from tests.engine.driver import Driver
from tests.engine.language.test_lora import (
    adapted,
    adapters,  # noqa: F401  (a fixture)
    ask_all,
    merged,
    serving,
)
from tests.engine.tiny_models import VISION_FAMILIES
from tests.engine.vision.test_tower_lora import check_mixed, of_merged, two_of, vision_of

Adapters = Callable[[str], list[Path]]


def config_of(cuda: str, **more: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "max_captured_tokens": 256} | more
    return EngineConfig(device=cuda, kv_nbytes=32 << 20, threads=2, **fields)


def plain_of(directory: Path, family: str, config: EngineConfig) -> Driver:
    executor = build_executor(config)
    vision = build_vision(directory, config, executor) if family in VISION_FAMILIES else None
    return Driver(directory, vision, build_language(directory, config, executor, 16))


def counted(forward: FusedForward, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replays of steps with adapters."""
    assert forward.graphs is not None and forward.prompt_graphs is not None
    replays: list[str] = []
    replay_decodes, replay_prompts = forward.graphs.replay, forward.prompt_graphs.replay

    def decodes(*args: Any, **given: bool) -> torch.Tensor | None:
        found = replay_decodes(*args, **given)
        replays.extend(["decodes"] * (given["adapters"] and found is not None))
        return found

    def prompts(flat: Any, *args: Any) -> torch.Tensor:
        replays.extend(["prompts"] * flat.shape.adapters)
        return replay_prompts(flat, *args)

    monkeypatch.setattr(forward.graphs, "replay", decodes)
    monkeypatch.setattr(forward.prompt_graphs, "replay", prompts)
    return replays


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "glm_ocr"])
async def test_four_and_a_bystander_equal_merged_models(
    family: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    adapters: Adapters,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32, captured and not; `glm_ocr` through transformers' layers."""
    for graphs in (True, False):
        config = config_of(cuda, cuda_graphs=graphs)
        plain = plain_of(model_dir(family), family, config)
        if graphs:
            sees = plain.vision is not None
            golden = merged(plain.model_dir, adapters(family), tmp_path, sees=sees)
        mixed = serving(plain, *adapters(family), config=config)
        replays: list[str] = []
        if isinstance(forward := mixed.language.forward, FusedForward) and graphs:
            replays = counted(forward, monkeypatch)
        for chunk in (4096, 16, 5):
            assert await ask_all(mixed, chunk) == golden, (graphs, chunk)
        assert set(replays) == ({"decodes", "prompts"} if graphs and family != "glm_ocr" else set())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
async def test_a_bystander_has_the_same_bits(
    kind: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    adapters: Adapters,  # noqa: F811
) -> None:
    """Prompts and decodes, captured and not, beside adapters and beside none; these steps have the
    bits of an engine that knows none.  What adapters say is near to what they say in fp32."""
    directory, found = model_dir("llama"), {}
    more: dict[str, Any] = {"dtype": kind}
    if kind == "fp8":
        more = {"dtype": "bfloat16", "quantization": "fp8"}
    for graphs in (True, False):
        config = config_of(cuda, cuda_graphs=graphs, **more)
        plain = plain_of(directory, "llama", config)
        mixed = serving(plain, *adapters("llama"), config=config)
        names = ["", *mixed.language.adapters, ""]
        for there, used in ((plain, [""] * 6), (mixed, [""] * 6), (mixed, names)):
            requests = [
                adapted(await there.request(str(i), chat("hello there")), name)
                for i, name in enumerate(used)
            ]
            logits = [there.language.logits([request.next_step(4096) for request in requests])]
            decodes = [
                replace(request.next_step(4096), token_ids=[65], start=len(request.token_ids))
                for request in requests
            ]
            logits.append(there.language.logits(decodes))
            there.release(requests)
            found[graphs, there is mixed, used is names] = [one.clone() for one in logits]
    for graphs in (True, False):
        first = found[graphs, False, False]
        for plainly, beside, one in zip(
            found[graphs, True, False], found[graphs, True, True], first, strict=True
        ):
            assert torch.equal(plainly, one)
            assert torch.equal(beside[[0, 5]], one[[0, 5]])
            assert not (beside[1:5] == one[1:5]).all(-1).any()
    limit = 1e-4 if kind == "float32" else 0.15 if kind == "bfloat16" else 0.3
    for captured, eager in zip(found[True, True, True], found[False, True, True], strict=True):
        assert float((captured - eager).norm() / eager.norm()) < limit


async def test_one_is_dropped_and_another_held(
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    adapters: Adapters,  # noqa: F811
) -> None:
    """In the same place, behind the same graphs."""
    config = config_of(cuda)
    plain = plain_of(model_dir("llama"), "llama", config)
    answers = []
    for first, second in ((0, 1), (1, 1)):
        mixed = serving(plain, adapters("llama")[first], config=config, max_loras=1)
        bank = mixed.language.bank
        assert bank is not None
        if first != second:
            bank.drop(bank.held[0])
            bank.hold(*bank.read(adapters("llama")[second]))
        request = adapted(await mixed.request("r", chat("hello there")), bank.held[0])
        answers.append(await mixed.run([request], 7))
    assert answers[0] == answers[1]


TOWERS = {  # by kind and graphs: the difference in norm to merged models in fp32
    ("float32", False): 1e-3,
    ("bfloat16", False): 0.05,
    ("bfloat16", True): 0.05,
}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl", "mistral3", "glm_ocr"])
async def test_towers_give_the_rows_of_merged_models(
    family: str,
    cuda: str,
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """In one batch, captured where the family is and not; who has none keeps the bits."""
    directory = model_dir(family)
    made = two_of(family, directory, tmp_path)
    golden = await of_merged(directory, made, tmp_path, config_of(cuda, cuda_graphs=False))
    for (dtype, graphs), limit in TOWERS.items():
        config = config_of(cuda, dtype=dtype, cuda_graphs=graphs)
        mixed = vision_of(directory, *made, config=config)
        captured = getattr(getattr(mixed.model.model, "visual", None), "graphs", None)
        assert (captured is not None) == (graphs and family == "qwen3_vl")
        await check_mixed(mixed, golden, limit)
