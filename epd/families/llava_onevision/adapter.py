"""LLaVA-OneVision: SigLIP over tiles, packed without padding and with newline rows, linear rope.

Every image is cut into tiles (anyres), also when a prompt has several.  The Hugging Face processor
does so for a flat list of images and shrinks each image to one tile for a nested list.  Rows that
depend on the number of a prompt's other images could not be cached by content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.messages import PixelBounds


class LlavaOnevision(ModelAdapter):
    model_type = "llava_onevision"
    modelling = "llava_onevision.modeling_llava_onevision"
    class_name = "LlavaOnevisionForConditionalGeneration"
    adapts_tower = True

    def image_processor(self) -> Any:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil,
        )

        settings = dict(self.checkpoint.preprocessor)
        settings.setdefault("image_grid_pinpoints", self.config.image_grid_pinpoints)
        return LlavaOnevisionImageProcessorPil(**settings)

    def to_patches(
        self, processor: Any, image: Any, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        features = processor(images=[image], return_tensors="pt")
        height, width = features["image_sizes"][0].tolist()
        return features["pixel_values"][0], (1, height, width)

    def encode(self, model: Any, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        device = next(model.model.vision_tower.parameters()).device
        tiles = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        sizes = torch.tensor([patches.grid_thw[1:] for patches in batch])
        output = model.model.get_image_features(tiles, sizes, return_dict=True)
        return torch.cat(list(output.pooler_output))

    def tower_layers(self, model: Any) -> Sequence[Any]:
        return list(model.model.vision_tower.encoder.layers)

    def smallest_image(self) -> tuple[int, int]:
        height, width = min(self.config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
        return width, height
