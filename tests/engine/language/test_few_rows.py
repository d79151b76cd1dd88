"""Which linear layers, and which of their rows, have a kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from epd.config import EngineConfig
from epd.engine.base import StepSequence
from epd.engine.factory import build_executor, build_language
from epd.engine.kernels import kernels_for
from epd.engine.language import few_rows
from epd.engine.language.few_rows import MOST_ROWS, FewRowsLinear, exchange
from epd.engine.language.products import side_by_side
from epd.messages import SamplingParams
from tests.engine.language.test_decoder import fuse

SPECIFIED = kernels_for("cpu")

CONFIG = EngineConfig(threads=1, kv_nbytes=16 << 20, dtype="bfloat16")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.q_proj = nn.Linear(32, 48, dtype=torch.float16)
        self.attention.k_proj = nn.Linear(32, 16, dtype=torch.float16)
        self.router = nn.Linear(32, 4, dtype=torch.float16)


def test_few_rows_of_16_bits_go_to_the_kernel_and_all_others_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []
    spec = SPECIFIED.product_of_few

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append((*x.shape, len(weight)))
        return spec(x, weight, bias)

    monkeypatch.setattr(SPECIFIED, "product_of_few", noted)
    layer = Layer()
    plain = side_by_side(layer.attention.q_proj, layer.attention.k_proj)
    exchange(nn.ModuleList([layer]))
    assert type(layer.router) is nn.Linear
    joined = side_by_side(layer.attention.q_proj, layer.attention.k_proj)
    assert isinstance(joined, FewRowsLinear) and joined.weight.shape == (64, 32)
    for shape in ((1, 32), (MOST_ROWS, 32), (2, 3, 32), (MOST_ROWS + 1, 32), (0, 32)):
        x = torch.randn(shape).half()
        found, expected = joined(x), plain(x)
        assert found.shape == expected.shape and torch.equal(found, expected)
    assert seen == [(1, 32, 64), (MOST_ROWS, 32, 64), (6, 32, 64)]
    wide = FewRowsLinear.of(nn.Linear(32, 8))
    wide(torch.randn(1, 32))
    assert len(seen) == 3, "float32 is torch's"


def test_steps_of_few_decodes_are_the_kernels(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token with and without, in the fused decoder: the same logits."""
    calls, spec = [0], SPECIFIED.product_of_few

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls[0] += 1
        return spec(x, weight, bias)

    monkeypatch.setattr(SPECIFIED, "product_of_few", counted)
    found = []
    for is_ours in (True, False):
        calls[0] = 0
        if not is_ours:
            monkeypatch.setattr(few_rows, "exchange", lambda layers: None)
        language = build_language(model_dir("qwen3"), CONFIG, build_executor(CONFIG))
        language.forward = fuse(language)
        table, sample = tuple(range(4)), SamplingParams(max_tokens=9)
        for step in range(3):
            sequence = StepSequence("r", (7 + step,), step, table, None, sample=sample)
            found.append(language.logits([sequence]))
        assert bool(calls[0]) is is_ours
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))
