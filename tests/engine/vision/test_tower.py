"""What a tower's own modules are exchanged for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from epd.engine.vision.tower import FusedLayer, GeluMlp, PackedAttention
from tests.engine.driver import Driver


@pytest.mark.parametrize(
    ("family", "is_gelu"),
    [("qwen3_vl", True), ("paddleocr_vl", True), ("qwen2_vl", False), ("qwen2_5_vl", False)],
)
async def test_which_modules_are_exchanged(
    family: str, is_gelu: bool, driver: Callable[[str], Driver]
) -> None:
    """That rows are as before is what `test_equality` says."""
    vision = driver(family).vision
    assert vision is not None
    blocks: Any = vision.model.model.visual.blocks
    assert all(isinstance(block, FusedLayer) for block in blocks)
    assert all(isinstance(block.attn, PackedAttention) for block in blocks)
    assert all(isinstance(block.mlp, GeluMlp) is is_gelu for block in blocks)


class Mlp(nn.Module):
    """Of a tower's shape, with any activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(8, 32), nn.Linear(32, 8)
        self.act_fn = activation


def test_another_activation_stays_what_it_is() -> None:
    assert GeluMlp.fits(Mlp(nn.GELU(approximate="tanh")))
    assert not GeluMlp.fits(Mlp(nn.GELU()))
    assert not GeluMlp.fits(Mlp(nn.SiLU()))
    mlp = Mlp(nn.GELU(approximate="tanh"))
    x = torch.randn(5, 8)
    expected = mlp.linear_fc2(mlp.act_fn(mlp.linear_fc1(x)))
    torch.testing.assert_close(GeluMlp(mlp)(x), expected)
