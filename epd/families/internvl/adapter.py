"""InternVL 3 and 3.5: InternViT over square tiles, pixel shuffle, a Qwen with linear rope.

Tiles are made by Hugging Face's processor on a CPU, and by the same arithmetic on a GPU.  A frame
of a video is a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.kernels.routing import Routing
from epd.engine.language.experts import by_softmax
from epd.engine.language.products import Foreign
from epd.engine.vision.image_ops import QwenImageOps, Scaling
from epd.engine.vision.image_resize import resized
from epd.engine.vision.tower import PatchProduct
from epd.families.internvl.sizes import tile_grid
from epd.media_files.video import video_settings
from epd.messages import PixelBounds
from epd.model_files.checkpoint import Settings
from epd.model_files.geometry import image_geometry


class TileOps(Scaling):
    """What the processor does behind decoding."""

    def __init__(self, processor: Foreign, settings: Settings) -> None:
        super().__init__(processor)
        self._tile, self._settings = int(processor.size.height), settings

    def patches(
        self, pixels: torch.Tensor, grid_thw: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """uint8 `[height, width, 3]` to tiles `[num_tiles, 3, side, side]`, on its device."""
        tile = self._tile
        columns, lines = tile_grid(self._settings, tile, pixels.shape[1], pixels.shape[0])
        whole = resized(pixels[None], lines * tile, columns * tile)[0]
        tiles = whole.view(lines, tile, columns, tile, 3).transpose(1, 2).flatten(0, 1)
        if len(tiles) > 1:
            tiles = torch.cat([tiles, resized(pixels[None], tile, tile)])
        return self.scaled(tiles, dtype)


class FrameOps(QwenImageOps):
    """Of a video, whose resized frames are tiles."""

    def patches(
        self, pixels: torch.Tensor, grid_thw: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """uint8 `[num_tiles, side, side, 3]` to `[num_tiles, 3, side, side]`, on its device."""
        return self.scaled(pixels, dtype)


class InternVL(ModelAdapter):
    model_type = "internvl"
    modelling = "internvl.modeling_internvl"
    class_name = "InternVLForConditionalGeneration"
    adapts_tower = True

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return lambda router: replace(by_softmax(router), normalised=bool(router.norm_topk_prob))

    def image_processor(self) -> Foreign:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )

        return GotOcr2ImageProcessorPil(**self.checkpoint.preprocessor)

    def image_ops(self, processor: Foreign) -> TileOps | None:
        does_all = processor.do_resize and processor.do_rescale and processor.do_normalize
        settings = self.checkpoint.preprocessor
        return TileOps(processor, settings) if does_all and processor.resample == 3 else None

    def video_ops(self) -> FrameOps | None:
        checkpoint = self.checkpoint
        settings = video_settings(checkpoint.config, checkpoint.video_preprocessor)
        return None if settings is None else FrameOps(settings)

    def to_patches(
        self, processor: Foreign, image: Foreign, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        # As the processor of prompts asks for, whatever the file says.
        features = processor(images=[image], crop_to_patches=True, return_tensors="pt")
        settings = self.checkpoint.config, self.checkpoint.preprocessor
        return features["pixel_values"], image_geometry(*settings, *image.size).grid_thw

    def adopt_vision(self, model: Foreign) -> None:
        first = model.model.vision_tower.embeddings.patch_embeddings
        first.projection = PatchProduct(first.projection)

    def encode(self, model: Foreign, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        seeing = model.model
        device = next(seeing.vision_tower.parameters()).device
        tiles = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        rows: torch.Tensor = seeing.get_image_features(tiles, return_dict=True).pooler_output
        return rows.flatten(0, 1)

    def tower_layers(self, model: Foreign) -> Sequence[Foreign]:
        return list(model.model.vision_tower.encoder.layer)

    def smallest_image(self) -> tuple[int, int]:
        width, height = self.config.vision_config.image_size  # one tile, where one may be all
        return width, height
