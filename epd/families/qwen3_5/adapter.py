"""Qwen3.5, dense and sparse: gated delta nets beside full attention; a tower without deepstack."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from epd.engine.delta_heads import DeltaHeads
from epd.engine.kernels.routing import Routing
from epd.engine.language.experts import by_softmax
from epd.engine.language.mixers import GatedAttention, Mixer, Norm, zero_centred_norm
from epd.engine.language.products import Foreign
from epd.engine.language.state_kinds import PagedRows, sequence_tensor
from epd.engine.sharding import WHOLE, Shard
from epd.families.qwen3_5.linear_attention import GatedDeltaNet
from epd.families.qwen_vl.adapter import LAYERS, Qwen3VL
from epd.messages import StateTensor

_DELTA = {
    f"model.language_model.layers.*.linear_attn.{name}": how
    for how, names in (
        ("delta_channels", "in_proj_qkv conv1d"),
        ("delta_values", "in_proj_z in_proj_b in_proj_a dt_bias A_log"),
        ("rowwise", "out_proj"),
    )
    for name in names.split()
}


class Qwen3_5(Qwen3VL):
    model_type = "qwen3_5"
    modelling = "qwen3_5.modeling_qwen3_5"
    class_name = "Qwen3_5ForConditionalGeneration"
    num_deepstack = 0
    tp_plan = LAYERS | _DELTA  # transformers would gather what these layers give

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        return super().paged_rows(shard).of(len(self._layers("full_attention")) + self.has_drafts)

    def draft_parts(self, modelling: Foreign) -> tuple[nn.Module, Foreign]:
        text = copy.deepcopy(self.text_config)
        text.layer_types = ["full_attention"]
        kind = self.class_name.removesuffix("ForConditionalGeneration")
        layer, norm = (getattr(modelling, kind + name) for name in ("DecoderLayer", "RMSNorm"))
        return layer(text, 0), norm

    @property
    def mixers(self) -> Sequence[type[Mixer]]:
        return GatedAttention, GatedDeltaNet

    @property
    def delta_heads(self) -> DeltaHeads:
        text = self.text_config
        return DeltaHeads(
            int(text.linear_num_key_heads),
            int(text.linear_num_value_heads),
            int(text.linear_key_head_dim),
            int(text.linear_value_head_dim),
        )

    def sequence_tensors(self, dtype: torch.dtype, shard: Shard = WHOLE) -> tuple[StateTensor, ...]:
        """The last inputs of each convolution, and the matrices of the delta rule."""
        heads, layers = self.delta_heads, len(self._layers("linear_attention"))
        parts, inputs = heads.parts(shard), int(self.text_config.linear_conv_kernel_dim) - 1
        channels, count = sum(n * width for n, width in parts), len(heads.of(shard).queries)
        matrix = heads.key_width, heads.value_width
        return (
            sequence_tensor("convolution", layers, inputs, (channels,), dtype, parts),
            sequence_tensor("recurrent", layers, count, matrix, torch.float32),
        )

    def adopt_shard(self, model: nn.Module, shard: Shard) -> None:
        layers = self.language_model(model).layers
        for at in self._layers("linear_attention"):
            self.delta_heads.resize(layers[at].linear_attn, shard)  # type: ignore[index]

    def adopt_language(self, model: Any) -> None:
        """Layers are numbered among those of their kind: so the pool counts them."""
        layers: Any = self.language_model(model).layers
        for index, at in enumerate(self._layers("full_attention")):
            layers[at].self_attn.layer_idx = index
        for index, at in enumerate(self._layers("linear_attention")):
            layers[at].linear_attn.layer_idx = index
        if self.has_drafts:  # its rows lie behind those of the others
            model.mtp.layers[0].self_attn.layer_idx = len(self._layers("full_attention"))

    def fused_norm(self, module: Any) -> Norm:
        return zero_centred_norm(module)

    def _layers(self, layer_type: str) -> list[int]:
        return [i for i, one in enumerate(self.text_config.layer_types) if one == layer_type]


class Qwen3_5Moe(Qwen3_5):
    model_type = "qwen3_5_moe"
    modelling = "qwen3_5_moe.modeling_qwen3_5_moe"
    class_name = "Qwen3_5MoeForConditionalGeneration"

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return by_softmax
