"""Idefics3 and SmolVLM: SigLIP over square tiles, pixel shuffle, a Llama with linear rope.

Tiles are made by Hugging Face's processor, so that they are transformers' by construction.  All are
as large as the tower was made for, and no tile is padded.  Videos are not taken: SmolVLM2's frames
are resized by torchvision and announced in words, and neither is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.messages import PixelBounds


class Idefics3(ModelAdapter):
    model_type = "idefics3"
    modelling = "idefics3.modeling_idefics3"
    class_name = "Idefics3ForConditionalGeneration"
    adapts_tower = True
    processor_name = "Idefics3ImageProcessorPil"
    language_modules = ("model.text_model", "lm_head")

    def language_model(self, model: Any) -> nn.Module:
        return model.model.text_model  # type: ignore[no-any-return]

    def image_processor(self) -> Any:
        name = f"transformers.models.{self.model_type}.image_processing_pil_{self.model_type}"
        processor = getattr(importlib.import_module(name), self.processor_name)
        return processor(**self.checkpoint.preprocessor)

    def to_patches(
        self, processor: Any, image: Any, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        features = processor(images=[[image]], return_row_col_info=True, return_tensors="pt")
        tiles, vision = features["pixel_values"][0], self.config.vision_config
        side = tiles.shape[-1] // vision.patch_size
        lines, columns = (max(1, features[name][0][0]) for name in ("rows", "cols"))
        return tiles, (1, lines * side, columns * side)

    def encode(self, model: Any, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        seeing = model.model
        device = next(seeing.vision_model.parameters()).device
        tiles = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        features = seeing.vision_model(pixel_values=tiles, return_dict=True).last_hidden_state
        rows: torch.Tensor = seeing.connector(features)
        return rows.flatten(0, 1)

    def tower_layers(self, model: Any) -> Sequence[Any]:
        return list(model.model.vision_model.encoder.layers)

    def smallest_image(self) -> tuple[int, int]:
        """Images are enlarged: a flat one has one line of tiles."""
        return 32, 8


class SmolVLM(Idefics3):
    """SmolVLM2: another name for the same parts, as far as images go."""

    model_type = "smolvlm"
    modelling = "smolvlm.modeling_smolvlm"
    class_name = "SmolVLMForConditionalGeneration"
    processor_name = "SmolVLMImageProcessorPil"
