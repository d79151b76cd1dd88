"""Mixtures of experts on the specification, beside transformers' modules, and what pads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.adapter import adapter_for
from epd.engine.kernels import kernels_for
from epd.engine.kernels.routing import Routing
from epd.engine.language.decoder import FusedDecoder
from epd.engine.language.experts import Mixture, adopt
from epd.engine.weights.loading import load_stage
from epd.model_files.checkpoint import read_checkpoint

SPECIFIED = kernels_for("cpu")

MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe", "kimi_k25")


def blocks(directory: Path) -> tuple[Any, list[Any]]:
    """The adapter, and the layers of a loaded stack."""
    adapter = adapter_for(read_checkpoint(directory))
    model = load_stage(adapter, "language", torch.float32, "cpu")
    return adapter, list(adapter.language_model(model).layers)  # type: ignore[call-overload]


@pytest.mark.parametrize("family", MIXTURES)
def test_equals_the_module_in_its_place(family: str, model_dir: Callable[[str], Path]) -> None:
    _, plain = blocks(model_dir(family))
    adapter, layers = blocks(model_dir(family))
    adopt(layers, adapter.routing)
    found = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
    before = [p.mlp for p, layer in zip(plain, layers, strict=True) if layer.mlp in found]
    assert len(found) == len(layers) - (family == "kimi_k25")  # whose first is dense
    for mixture, block in zip(found, before, strict=True):
        names = {name for name, _ in block.named_parameters()}
        assert {name for name, _ in mixture.named_parameters()} == names
        hidden = mixture.experts.down_proj.shape[1]
        for num_tokens in (1, 17):
            x = torch.randn(1, num_tokens, hidden)
            expected = block(x)
            torch.testing.assert_close(mixture(x), expected, atol=2e-5, rtol=1e-5)
            slots = torch.arange(num_tokens)
            slots[::2] = -1
            padded = mixture(x[0].clone(), slots)
            kept = slots >= 0
            torch.testing.assert_close(padded[kept], expected[0][kept], atol=2e-5, rtol=1e-5)


def test_what_pads_is_no_experts_pair() -> None:
    logits = torch.randn(5, 4)
    slots = torch.tensor([7, -1, 3, -1, -1])
    routed = SPECIFIED.route(logits, Routing(2), slots)
    assert int(routed.counts.sum()) == 2 * 2
    assert routed.experts[[1, 3, 4]].tolist() == [[-1, -1]] * 3
    x = torch.randn(5, 8)
    x[1] = torch.nan
    out = SPECIFIED.multiply_experts(x, torch.randn(4, 12, 8), torch.randn(4, 8, 6), routed)
    assert out[[1, 3, 4]].count_nonzero() == 0 and out.isfinite().all()


def test_a_mixture_of_unknown_shape_stays(model_dir: Callable[[str], Path]) -> None:
    """With a bias beside its weights, say; its steps are not captured then."""
    adapter, layers = blocks(model_dir("qwen3_vl_moe"))
    layers[1].mlp.experts.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 64))
    left = layers[1].mlp
    adopt(layers, adapter.routing)
    assert layers[1].mlp is left and isinstance(layers[0].mlp, Mixture)
    assert not _decoder(adapter, layers).can_be_captured
    layers[1].mlp = layers[0].mlp
    assert _decoder(adapter, layers).can_be_captured


def _decoder(adapter: Any, layers: list[Any]) -> FusedDecoder:
    class Stack:
        embed_tokens = rotary_emb = None
        norm = layers[0].input_layernorm

    stack: Any = Stack()
    stack.layers = layers
    return FusedDecoder(stack, SPECIFIED, adapter)
