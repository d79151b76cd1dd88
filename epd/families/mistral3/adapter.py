"""Mistral 3: Pixtral at native resolution, a mark behind each line of rows, linear rope.

The language model is Mistral's, or Ministral 3's, whose queries grow with their position.  Mistral
Small 4 has these queries over latent rows, and experts that are chosen by a softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.kernels.routing import Routing
from epd.engine.language.experts import by_groups
from epd.engine.language.mixers import Mixer, NormOf, PagedAttention, Step
from epd.engine.language.products import Foreign
from epd.engine.language.state_kinds import PagedRows
from epd.engine.sharding import WHOLE, Shard
from epd.engine.vision.image_ops import QwenImageOps
from epd.families.kimi.latent_attention import HEADS, LatentAttention, latent_rows
from epd.families.mistral3 import tower as pixtral
from epd.families.mistral3.sizes import side
from epd.messages import PixelBounds


class GrowingQueries:
    """Behind the length that the model began with they are larger (Llama 4's rule)."""

    def __init__(self, layer: Foreign, kernels: Foreign, norm_of: NormOf) -> None:
        super().__init__(layer, kernels, norm_of)  # type: ignore[call-arg]
        rope = layer.self_attn.config.rope_parameters
        self._beta = float(rope["llama_4_scaling_beta"])
        self._length = int(rope["original_max_position_embeddings"])

    def scaled(self, query: torch.Tensor, step: Step) -> torch.Tensor:
        derived, positions = step.batch.derived, step.batch.positions[0]
        key = "scales", positions.is_cuda and torch.cuda.is_current_stream_capturing()
        if key not in derived:  # once for all layers; within a capture, once for it
            times = torch.floor(positions / self._length)
            derived[key] = (1 + self._beta * torch.log(1 + times),)
        (scales,) = derived[key]
        return query * scales[:, None, None].to(query.dtype)


class ScaledAttention(GrowingQueries, PagedAttention):
    """Of Ministral 3."""


class ScaledLatent(GrowingQueries, LatentAttention):
    """Of Mistral Small 4."""


class Mistral3(ModelAdapter):
    model_type = "mistral3"
    modelling = "mistral3.modeling_mistral3"
    class_name = "Mistral3ForConditionalGeneration"
    adapts_tower = True
    tp_plan = HEADS

    @property
    def mixers(self) -> Sequence[type[Mixer]]:
        own: dict[str, type[Mixer]] = {"ministral3": ScaledAttention, "mistral4": ScaledLatent}
        return (own.get(self.text_config.model_type, PagedAttention),)

    def paged_rows(self, shard: Shard = WHOLE) -> PagedRows:
        is_latent = self.text_config.model_type == "mistral4"
        return latent_rows(self.text_config) if is_latent else super().paged_rows(shard)

    @property
    def routing(self) -> Callable[[Foreign], Routing]:
        return by_groups

    # --- vision -----------------------------------------------------------------------------------

    def image_processor(self) -> Foreign:
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            PixtralImageProcessorPil,
        )

        row = side(self.checkpoint.config)
        return PixtralImageProcessorPil(**self.checkpoint.preprocessor | {"patch_size": row})

    def image_ops(self, processor: Foreign) -> QwenImageOps | None:
        names = "do_resize do_rescale do_normalize rescale_factor resample image_mean image_std"
        said = {name: getattr(processor, name) for name in names.split()}
        patch = self.config.vision_config.patch_size
        lines = SimpleNamespace(**said, patch_size=patch, merge_size=1, temporal_patch_size=1)
        return QwenImageOps(lines) if QwenImageOps.fits(lines) else None

    def adopt_vision(self, model: Foreign) -> None:
        pixtral.adopt(model.model.vision_tower)

    def tower_layers(self, model: Foreign) -> Sequence[Foreign]:
        return pixtral.seen_layers(model.model)

    def to_patches(
        self, processor: Foreign, image: Foreign, bounds: PixelBounds | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"][0]
        p = int(self.config.vision_config.patch_size)
        rows, columns = pixels.shape[1] // p, pixels.shape[2] // p
        split = pixels.unflatten(2, (columns, p)).unflatten(1, (rows, p)).permute(1, 3, 0, 2, 4)
        return split.reshape(rows * columns, -1), (1, rows, columns)

    def encode(self, model: Foreign, batch: Sequence[Patches], dtype: torch.dtype) -> torch.Tensor:
        device = next(model.model.vision_tower.parameters()).device
        pixels = torch.cat([patches.pixels for patches in batch]).to(device=device, dtype=dtype)
        return pixtral.run(model.model, pixels, [patches.grid_thw for patches in batch])
