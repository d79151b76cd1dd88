"""GLM-4.1V to 4.6V and GLM-OCR: multimodal rope, native resolution, towers with smooth positions.

Layers of the dense ones have four norms; those of the mixtures are common.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import grid_sample

from epd.engine.device.copies import upload
from epd.engine.kernels.routing import Routing
from epd.engine.language.experts import by_groups
from epd.engine.language.products import Foreign
from epd.engine.vision import tower
from epd.families.qwen_vl.adapter import Qwen2VL

_LAYER = "model.language_model.layers.*."
_HEADS = {f"{_LAYER}self_attn.{n}_proj": "rowwise" if n == "o" else "colwise" for n in "qkvo"}


class SmoothPositions(nn.Module):
    """Positions between the points that a tower has; `lengths` and `shapes` are on the host."""

    def __init__(self, plain: Foreign) -> None:
        super().__init__()
        self.position_embedding = plain.position_embedding

    def forward(
        self, rows: torch.Tensor, lengths: torch.Tensor, shapes: torch.Tensor, *place: torch.Tensor
    ) -> torch.Tensor:
        weight = self.position_embedding.weight
        side = round(len(weight) ** 0.5)
        points = weight.view(1, side, side, -1).permute(0, 3, 1, 2).float()
        frames = shapes[:, 1:].float().repeat_interleave(shapes[:, 0], 0)
        sizes = upload(frames.repeat_interleave(lengths, 0), rows.device)
        at = (torch.stack(place, -1) + 0.5) / sizes * 2 - 1
        how = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
        found = grid_sample(points, at.flip(-1)[None, :, None], **how)
        return rows + found[0, :, :, 0].t().to(rows.dtype)


class NormedHeads(nn.Module):
    """Queries, keys and values of a tower, the first two with norms of their heads."""

    def __init__(self, attention: Foreign) -> None:
        super().__init__()
        self.qkv, self.num_heads = attention.qkv, attention.num_heads
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(rows).view(len(rows), 3, self.num_heads, -1).unbind(1)
        return torch.stack([self.q_norm(queries), self.k_norm(keys), values], 1).flatten(1)


class Glm4v(Qwen2VL):
    model_type = "glm4v"
    modelling = "glm4v.modeling_glm4v"
    class_name = "Glm4vForConditionalGeneration"
    adapts_tower = True
    tp_plan = _HEADS | {
        f"{_LAYER}mlp.gate_up_proj": "packed_colwise", f"{_LAYER}mlp.down_proj": "rowwise",
    }  # fmt: skip

    def image_processor(self) -> Foreign:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil(**self.checkpoint.preprocessor)

    def adopt_vision(self, model: Foreign) -> None:
        visual = model.model.visual
        if hasattr(visual, "embeddings"):
            visual.embeddings = SmoothPositions(visual.embeddings)
        visual.downsample = tower.PatchProduct(visual.downsample)
        tower.adopt(visual)

    def capture_vision(self, *_: object) -> None:
        """Not: its positions follow the grids of a batch."""


class Glm46V(Glm4v):
    model_type = "glm46v"
    modelling = "glm46v.modeling_glm46v"
    class_name = "Glm46VForConditionalGeneration"


class GlmOcr(Glm4v):
    model_type = "glm_ocr"
    modelling = "glm_ocr.modeling_glm_ocr"
    class_name = "GlmOcrForConditionalGeneration"

    def adopt_vision(self, model: Foreign) -> None:
        for block in model.model.visual.blocks:
            block.attn.qkv = NormedHeads(block.attn)
        super().adopt_vision(model)


class Glm4vMoe(Glm4v):
    model_type = "glm4v_moe"
    modelling = "glm4v_moe.modeling_glm4v_moe"
    class_name = "Glm4vMoeForConditionalGeneration"
    tp_plan = _HEADS  # transformers has that of the rest

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return by_groups
