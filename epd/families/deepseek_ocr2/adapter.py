"""DeepSeek-OCR 2: SAM and a Qwen2 that reads it by learned queries, over tiles; a small mixture.

The processor of prompts asks for tiles, whatever the file has.  Videos are not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.kernels.routing import Routing
from epd.engine.language.products import Foreign
from epd.families.deepseek_ocr2.sizes import TILED, sides
from epd.messages import PixelBounds
from epd.model_files.geometry import image_geometry

Views = Sequence[torch.Tensor]


class Each(nn.Module):
    """A layer over views of two sizes, so that a run calls it once and can be cut there."""

    def __init__(self, layer: Foreign) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, views: Views, given: Sequence[dict[str, Foreign]] = ({}, {})) -> Views:
        return [self.layer(view, **more) for view, more in zip(views, given, strict=False)]


def rows_of(tower: Foreign, views: Views) -> Views:
    """Pixels `[n, 3, side, side]` to rows `[n, queries, width]`, of each size."""
    sam, reader = tower.sam_encoder, tower.vision_encoder
    queries = [one.weight for one in (tower.query_768_resolution, tower.query_1024_resolution)]
    grids: Views = [sam.patch_embed(view) for view in views]
    grids = [grid + sam.interpolate_pos_encoding(*grid.shape[1:3]) for grid in grids]
    for layer in sam.layers:
        grids = layer(grids)
    rows: Views = []
    given = []
    for grid in grids:
        seen = sam.proj(sam.neck(grid)).flatten(2).transpose(1, 2)
        asked = next(weight for weight in queries if len(weight) == seen.shape[1])
        rows = [*rows, torch.cat([seen, asked.expand(len(seen), -1, -1)], dim=1)]
        # Places see each other both ways; each query sees them and the queries before it.
        places = torch.arange(2 * len(asked), device=seen.device)
        mask = places <= places[:, None].clamp(min=len(asked) - 1)
        turns = reader.rotary_emb(seen, places[None])
        given.append({"attention_mask": mask[None, None], "position_embeddings": turns})
    for layer in reader.layers:
        rows = layer(rows, given)
    return [reader.norm(of_size).chunk(2, dim=1)[1] for of_size in rows]


class DeepseekOcr2(ModelAdapter):
    model_type = "deepseek_ocr2"
    modelling = "deepseek_ocr2.modeling_deepseek_ocr2"
    class_name = "DeepseekOcr2ForConditionalGeneration"

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return lambda router: Routing(
            int(router.top_k), normalised=False, scaling=float(router.routed_scaling_factor)
        )

    def image_processor(self) -> Foreign:
        from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
            DeepseekOcr2ImageProcessorPil,
        )

        return DeepseekOcr2ImageProcessorPil(**self.checkpoint.preprocessor)

    def to_patches(
        self, processor: Foreign, image: Foreign, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Numbers of all views in a row, the whole's last."""
        found = processor(images=[image], return_tensors="pt", **TILED)
        views = [*found.get("pixel_values_local", ()), found["pixel_values"]]
        settings = self.checkpoint.config, self.checkpoint.preprocessor
        pixels = torch.cat([view.flatten() for view in views])
        return pixels, image_geometry(*settings, *image.size).grid_thw

    def adopt_vision(self, model: Foreign) -> None:
        tower = model.model.vision_tower
        for part in (tower.sam_encoder, tower.vision_encoder):
            part.layers = nn.ModuleList(map(Each, part.layers))

    def tower_layers(self, model: Foreign) -> Sequence[Foreign]:
        tower = model.model.vision_tower
        return [*tower.sam_encoder.layers, *tower.vision_encoder.layers]

    def encode(self, model: Foreign, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        seeing, (tile, whole) = model.model, sides(self.checkpoint.preprocessor)
        end = seeing.view_separator[None]
        every = [patches.pixels.to(end.device, dtype) for patches in batch]
        wholes = [one[-3 * whole**2 :].view(1, 3, whole, whole) for one in every]
        tiles = [one[: -3 * whole**2].view(-1, 3, tile, tile) for one in every]
        views = [torch.cat(of_size) for of_size in (wholes, tiles) if any(map(len, of_size))]
        seen, *local = map(seeing.multi_modal_projector, rows_of(seeing.vision_tower, views))
        parts = (local[0] if local else seen[:0]).split([len(one) for one in tiles])
        each = zip(parts, seen, strict=True)
        return torch.cat([row for part, one in each for row in (part.flatten(0, 1), one, end)])
