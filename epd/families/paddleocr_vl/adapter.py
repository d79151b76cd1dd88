"""PaddleOCR-VL: SigLIP at native resolution with rope, multimodal rope, an ERNIE 4.5.

The processor gives patches line by line; the tower takes them in merge blocks, as those of the Qwen
families do, whose parts are used for the rest.  Videos are not taken.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from epd.engine.base import Patches
from epd.engine.language.products import Foreign, side_by_side
from epd.engine.vision import tower
from epd.engine.vision.image_ops import QwenImageOps
from epd.families.qwen_vl.adapter import Qwen2VL
from epd.messages import PixelBounds


class SigLipTower(nn.Module):
    """A loaded tower and its projector, under the names that the Qwen families have for it."""

    def __init__(self, model: Foreign) -> None:
        super().__init__()
        plain, projector = model.visual.vision_model, model.projector
        places = plain.embeddings
        self.num_grid_per_side = places.num_grid_per_side
        self.interpolation_align_corners = places.interpolation_align_corners
        self.spatial_merge_size = projector.merge_kernel_size[0]
        self.patch_embed = nn.ModuleDict({"proj": places.patch_embedding})
        self.position_embedding = places.position_embedding
        self.rotary_pos_emb = plain.encoder.rotary_pos_emb
        self.blocks = nn.ModuleList(map(_block, plain.encoder.layers))
        self.post_layernorm, self.merger = plain.post_layernorm, projector
        tower.adopt(self)

    def forward(
        self,
        pixels: torch.Tensor,
        position_ids: torch.Tensor,
        interp_indices: torch.Tensor,
        interp_weights: torch.Tensor,
        **given: Foreign,
    ) -> SimpleNamespace:
        """pixels `[T, 3 * patch ** 2]` in merge blocks; `pooler_output`: rows of all images."""
        places = self.position_embedding(interp_indices) * interp_weights[:, :, None]
        rows = self.patch_embed(pixels)
        rows = rows + places.sum(1).to(rows.dtype)
        turns = self.rotary_pos_emb(rows, position_ids)
        for block in self.blocks:
            rows = block(rows, position_embeddings=turns, cu_seqlens=given["cu_seqlens"])
        merger = self.merger
        rows = merger.pre_norm(self.post_layernorm(rows))
        rows = rows.view(-1, self.spatial_merge_size**2 * rows.shape[1])
        return SimpleNamespace(pooler_output=merger.linear_2(merger.act(merger.linear_1(rows))))


def _block(layer: Foreign) -> nn.Module:
    attention, mlp = layer.self_attn, layer.mlp
    attention.qkv = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
    attention.proj = attention.out_proj
    named = {"linear_fc1": mlp.fc1, "linear_fc2": mlp.fc2, "act_fn": mlp.activation_fn}
    parts = nn.ModuleDict(named)
    mlp = parts if tower.GeluMlp.fits(parts) else mlp
    norms = {"norm1": layer.layer_norm1, "norm2": layer.layer_norm2}
    return nn.ModuleDict({"attn": attention, "mlp": mlp, **norms})


class PaddleOcrVl(Qwen2VL):
    model_type = "paddleocr_vl"
    modelling = "paddleocr_vl.modeling_paddleocr_vl"
    class_name = "PaddleOCRVLForConditionalGeneration"
    adapts_tower = True

    def image_processor(self) -> Foreign:
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
            PaddleOCRVLImageProcessorPil,
        )

        return PaddleOCRVLImageProcessorPil(**self.checkpoint.preprocessor)

    def image_ops(self, processor: Foreign) -> QwenImageOps | None:
        lines = copy.copy(processor)
        lines.merge_size = 1
        return QwenImageOps(lines) if QwenImageOps.fits(lines) else None

    def adopt_vision(self, model: Foreign) -> None:
        model.model.visual = SigLipTower(model.model)

    def to_patches(
        self, processor: Foreign, image: Foreign, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        pixels, grid_thw = super().to_patches(processor, image, bounds)
        return pixels.flatten(1), grid_thw

    def encode(self, model: Foreign, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        merge = int(self.config.vision_config.spatial_merge_size)
        blocks = [replace(patches, pixels=_in_blocks(patches, merge)) for patches in batch]
        return super().encode(model, blocks, dtype)


def _in_blocks(patches: Patches, merge: int) -> torch.Tensor:
    _, rows, columns = patches.grid_thw
    lines = patches.pixels.view(rows // merge, merge, columns // merge, merge, -1)
    return lines.transpose(1, 2).reshape(rows * columns, -1)
