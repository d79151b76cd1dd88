"""Qwen3.5, dense and sparse: gated delta-net layers beside full attention; a tower without
deepstack."""

from __future__ import annotations

from typing import Any

import torch

from epd.engine.experts import by_softmax
from epd.engine.linear_attention import GatedDeltaNet
from epd.engine.mixers import GatedAttention, Norm, zero_centred_norm
from epd.engine.models.base import ModelAdapter
from epd.engine.models.qwen_vl import Qwen3VL
from epd.engine.products import Foreign
from epd.engine.routing import Routing
from epd.engine.sharding import WHOLE, Shard
from epd.engine.state_kinds import PagedRows, sequence_tensor
from epd.messages import StateTensor


class Qwen3_5(Qwen3VL):
    model_type = "qwen3_5"
    modelling = "qwen3_5.modeling_qwen3_5"
    class_name = "Qwen3_5ForConditionalGeneration"
    skipped = (*ModelAdapter.skipped, r"^mtp\.")  # layers that draft
    layer_types = frozenset({"full_attention", "linear_attention"})
    num_deepstack = 0
    mixers = (GatedAttention, GatedDeltaNet)

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        return super().paged_rows(shard).of(len(self._layers("full_attention")))

    def sequence_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of each convolution, and the matrices of the delta rule."""
        text, layers = self.text_config, len(self._layers("linear_attention"))
        keys = int(text.linear_num_key_heads) * int(text.linear_key_head_dim)
        heads, size = int(text.linear_num_value_heads), int(text.linear_value_head_dim)
        inputs, channels = int(text.linear_conv_kernel_dim) - 1, 2 * keys + heads * size
        matrix = int(text.linear_key_head_dim), size
        return (
            sequence_tensor("convolution", layers, inputs, (channels,), dtype),
            sequence_tensor("recurrent", layers, heads, matrix, torch.float32),
        )

    def adopt_language(self, model: Any) -> None:
        """Layers are numbered among those of their kind: so the pool counts them."""
        layers: Any = self.language_model(model).layers
        for index, at in enumerate(self._layers("full_attention")):
            layers[at].self_attn.layer_idx = index
        for index, at in enumerate(self._layers("linear_attention")):
            layers[at].linear_attn.layer_idx = index

    def fused_norm(self, module: Any) -> Norm:
        return zero_centred_norm(module)

    def _layers(self, layer_type: str) -> list[int]:
        return [i for i, one in enumerate(self.text_config.layer_types) if one == layer_type]


class Qwen3_5Moe(Qwen3_5):
    model_type = "qwen3_5_moe"
    modelling = "qwen3_5_moe.modeling_qwen3_5_moe"
    class_name = "Qwen3_5MoeForConditionalGeneration"

    def routing(self, router: Foreign) -> Routing:
        return by_softmax(router)
