"""DeepSeek-V3: latent attention, experts chosen by groups, linear rope, a layer that drafts.

Kimi-K2.5 has MoonViT at native resolution before it; as published, no layer drafts.  Every rank of
a group keeps all latent rows and has a part of the heads.  Videos are not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.kernels.routing import Routing
from epd.engine.language.experts import by_groups
from epd.engine.language.mixers import Mixer
from epd.engine.language.products import Foreign
from epd.engine.language.state_kinds import PagedRows
from epd.engine.sharding import WHOLE, Shard
from epd.engine.vision.image_ops import rgb_bytes
from epd.families.kimi import tower as kimi_tower
from epd.families.kimi.image_ops import NavitImageOps
from epd.families.kimi.latent_attention import HEADS, LatentAttention, latent_rows
from epd.families.kimi.sizes import navit_settings
from epd.messages import PixelBounds
from epd.model_files.geometry import image_geometry


class DeepseekV3(ModelAdapter):
    model_type = "deepseek_v3"
    modelling = "deepseek_v3.modeling_deepseek_v3"
    class_name = "DeepseekV3ForCausalLM"
    tp_plan = HEADS

    def draft_parts(self, modelling: Foreign) -> tuple[nn.Module, Foreign]:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

        if not (text := self.text_config).num_nextn_predict_layers:
            return super().draft_parts(modelling)
        return theirs.DeepseekV3DecoderLayer(text, text.num_hidden_layers), theirs.DeepseekV3RMSNorm

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        return latent_rows(self.text_config, self.has_drafts)

    @property
    def mixers(self) -> Sequence[type[Mixer]]:
        return (LatentAttention,)

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return by_groups


class KimiK25(DeepseekV3):
    model_type = "kimi_k25"
    modelling = "kimi_k25.modeling_kimi_k25"
    class_name = "Kimi_K25ForConditionalGeneration"

    def of_joint(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Published towers rotate neighbours, transformers' rotates halves."""
        if ".v_proj." in name:
            return stored
        heads = int(self.config.vision_config.num_attention_heads)
        return stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    # --- vision -----------------------------------------------------------------------------------

    def image_processor(self) -> Any:
        return navit_settings(self.checkpoint.preprocessor)

    def image_ops(self, processor: Any) -> NavitImageOps:
        return NavitImageOps(processor)

    def adopt_vision(self, model: Any) -> None:
        kimi_tower.adopt(model.model.vision_tower)

    def tower_layers(self, model: Any) -> Sequence[Any]:
        return list(model.model.vision_tower.layers)

    def to_patches(
        self, processor: Any, image: Any, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        checkpoint = self.checkpoint
        grid = image_geometry(checkpoint.config, checkpoint.preprocessor, *image.size).grid_thw
        pixels = torch.from_numpy(rgb_bytes(image).copy())
        return NavitImageOps(processor).patches(pixels, grid, torch.float32), grid

    def encode(self, model: Any, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        device = next(model.model.vision_tower.parameters()).device
        pixels = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        return kimi_tower.run(model.model, pixels, [patches.grid_thw for patches in batch])
